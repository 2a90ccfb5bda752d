"""The processes that supervise a run start without torch."""

from tests.interpreter import python


def test_driver_agents_and_their_messages_load_without_torch():
    code = (
        "import importlib, pkgutil, sys, weft.engine.supervision.rank.agent_link, weft.comm.key\n"
        "from weft.engine.supervision import agent, connection, control, driver, faults, messages, progress_page\n"
        "for room in (agent, driver):\n"
        "    for module in pkgutil.walk_packages(room.__path__, f'{room.__name__}.'):\n"
        "        importlib.import_module(module.name)\n"
        "heavy = {'torch', 'numpy', 'deepspeed', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = python("-c", code, timeout_s=60)
    assert done.returncode == 0, done.stderr
