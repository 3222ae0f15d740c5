"""The picture of the roofline."""

import struct

from pipeline.config.hardware import load, with_node
from pipeline.planner import roofline
from pipeline.planner.plan import plan, table
from tests.world import configured

SMALL = ("stage=pretrain", "model=llama-tiny", "training.sequence_length=128", "training.global_batch_size=32")


def test_the_roofline_is_a_picture(tmp_path):
    result = plan(configured(*SMALL), 2, with_node(load("h100"), gpus_per_node=2))
    roofline.draw(result, table(result), tmp_path / "roofline.png")
    content = (tmp_path / "roofline.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width > height > 500
    assert [path.name for path in tmp_path.iterdir()] == ["roofline.png"]
