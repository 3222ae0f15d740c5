"""tools/reshard_matrix: layouts of four ranks, loaded in each other; tests of the engine and of pretrain load in further ones."""

import pytest

from pipeline.checkpoint import native
from tests.world import configured
from tools.audit import resharding
from tools.jobs import build_trainer

#: Family -> layouts with different pieces, partitions and owners.
SAMPLE = {
    "llama": ["z3x4", "t2p2z0x4", "t2c2z1ux4"],
    "mixtral": ["t4z1-sx4", "e2z3x4", "t2e2z1wx4"],
    "deepseek_v3": ["t2e2z1x4", "e4z1x4", "t2p2z0x4"],
}


@pytest.mark.long
@pytest.mark.parametrize("family", SAMPLE)
def test_every_layout_loads_the_checkpoints_of_all_others(world, tmp_path, family):
    layouts = {resharding.name_of(layout): layout for layout in resharding.LAYOUTS[family]}
    configs = {name: configured(*resharding.overrides(family, layouts[name])) for name in SAMPLE[family]}
    world.run(resharding.serve_sources, [(family, name, config) for name, config in configs.items()], tmp_path)
    jobs = [(family, name, config, list(configs)) for name, config in configs.items()]
    cells = [cell for rank in world.run(resharding.load_cells, jobs, tmp_path) for cell in rank]
    assert sorted(cells) == sorted((family, source, name, "") for source in configs for name in configs)


def test_the_matrix_has_at_least_twelve_layouts_of_every_family():
    for layouts in resharding.LAYOUTS.values():
        names = {resharding.name_of(layout) for layout in layouts}
        assert len(names) == len(layouts) >= 12


@pytest.mark.long
def test_another_value_is_found(world, tmp_path):
    """One element of one rank's fragment of one moment."""
    name = "t2p2z0x4"
    layouts = {resharding.name_of(layout): layout for layout in resharding.LAYOUTS["llama"]}
    config = configured(*resharding.overrides("llama", layouts[name]))
    world.run(save_spoiled, config, tmp_path)
    assert "exp_avg of blocks." in resharding.difference(native.folder_of(tmp_path, 1), None)


def save_spoiled(config, run_dir):
    """On a rank."""
    trainer = build_trainer(config)
    with resharding.saving(trainer, config, run_dir) as save:
        resharding.fill(trainer.engine.fragments(), known=True)
        last = [fragment for fragment in trainer.engine.fragments() if "blocks." in fragment.piece.name][-1]
        last.tensors["exp_avg"][-1] += 1
        save(1)
