"""Damage at random, by a generator whose seed says which."""


def damaged(data, luck):
    """``data`` with bytes changed, cut out, doubled, added or at its end missing."""
    data = bytearray(data)
    for _ in range(luck.randint(1, 4)):
        at, span = luck.randrange(len(data) + 1), luck.choice([1, 2, 4, 8, 48, 96])
        match luck.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << luck.randrange(8)
            case 1:
                data[at : at + span] = luck.choice([b"\0", b"\xff", b"\x80", b"\x7f"]) * len(data[at : at + span])
            case 2:
                del data[at : at + span]
            case 3:
                data[at:at] = data[at : at + span]
            case _:
                data[at:at] = luck.randbytes(span)
    return bytes(data)
