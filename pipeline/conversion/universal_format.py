"""Names of the files and entries of DeepSpeed's universal checkpoints (deepspeed/checkpoint/constants.py and ds_to_universal.py, 0.19).

A folder ROOT has `latest_universal` with the name of the folder of a step, which contains

    zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt   the tensor of the parameter NAME, in full, as {"param": tensor, "cat_dim": 0}
    zero/NAME/step.pt                              the optimizer's step; only ZeRO 1 and 2 write and read it
    zero/optimizer_state.pt                        what is not of one parameter; ZeRO 3 reads the step here
    mp_rank_00_model_states.pt                     the engine's counters, read with ZeRO 1 and 2
    zero_pp_rank_0_mp_rank_00_model_states.pt      the same, read with ZeRO 3
"""

from __future__ import annotations

LATEST = "latest_universal"
ZERO, OPTIMIZER, STEP = "zero", "optimizer_state.pt", "step.pt"
MODEL_SUFFIX = "model_states.pt"
MODEL_FILES = (f"mp_rank_00_{MODEL_SUFFIX}", f"zero_pp_rank_0_mp_rank_00_{MODEL_SUFFIX}")
#: Kind of tensors in our checkpoints -> file of a parameter.
FILES = {"weight": "fp32.pt", "exp_avg": "exp_avg.pt", "exp_avg_sq": "exp_avg_sq.pt"}
#: Entries of these files.
PARAM, CAT_DIM, PARAM_SHAPES = "param", "cat_dim", "param_shapes"
PARAM_GROUPS, OPTIMIZER_STATE, DS_VERSION = "param_groups", "optimizer_state_dict", "ds_version"
INFO, INFO_VERSION, VERSION = "universal_checkpoint_info", "universal_checkpoint_version", 0.4
