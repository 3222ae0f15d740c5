# JUWELS Booster (Jülich): an example of a site with modules and a fast network, written from its documentation, not run there.
module load Stages/2025 GCC OpenMPI Python
source .venv/bin/activate
export SLURM_MPI_TYPE=pspmix         # ParaStation's Slurm plugin, which starts Open MPI programs
export NCCL_SOCKET_IFNAME=ib0        # connections are set up over InfiniBand, not the management network
export GLOO_SOCKET_IFNAME=ib0
export NCCL_IB_TIMEOUT=22
