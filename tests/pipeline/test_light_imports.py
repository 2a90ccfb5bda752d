"""The pipeline package and its commands start without torch."""

from tests.interpreter import python


def test_commands_and_pipeline_load_neither_torch_nor_matplotlib():
    code = (
        "import importlib, pkgutil, sys, weft.pipeline\n"
        "for module in pkgutil.walk_packages(weft.pipeline.__path__, 'weft.pipeline.'):\n"
        "    importlib.import_module(module.name)\n"
        "from weft.tools import cli\n"
        "assert cli.main(['schedule', 'zbv', '--ranks', '2', '--microbatches', '4']) == 0\n"
        "import weft.tools.simulate\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'deepspeed', 'transformers', 'hydra'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = python("-c", code, timeout_s=60)
    assert done.returncode == 0, done.stderr
