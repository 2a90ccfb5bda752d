"""A run joins its job once, and fits its batch to it once."""

from tests.recipes.joins import joins_and_fits
from tests.recipes.runs import prepare
from weft.tools.ranks import run_ranks


def test_a_run_joins_its_job_and_fits_its_batch_once(tmp_path):
    settings = [*prepare(tmp_path), "train.steps=1", "pipeline.stages=1", "train.name=run"]
    assert run_ranks(1, joins_and_fits, settings) == [(1, 1)]
