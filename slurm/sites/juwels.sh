# JUWELS Booster (Jülich): example of a cluster with modules and InfiniBand, based on its documentation, not tested there.
module load Stages/2025 GCC OpenMPI Python
if [ -f .venv/bin/activate ]; then source .venv/bin/activate; fi
export SLURM_MPI_TYPE=pspmix         # Slurm plugin of ParaStation, which starts Open MPI programs
export NCCL_SOCKET_IFNAME=ib0        # bootstrap over InfiniBand instead of the management network
export GLOO_SOCKET_IFNAME=ib0
export NCCL_IB_TIMEOUT=22
