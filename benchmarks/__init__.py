"""Benchmarks, each `main(argv) -> int`; `python -m benchmarks NAME` runs one from the root of a checkout."""

if __name__ != "benchmarks":  # an editable installation maps the whole checkout to `weft`
    raise ImportError(f"{__name__}: benchmarks are not part of the package; import `benchmarks` in a checkout of Weft")
