# tools/devcluster: four Slurm nodes on one machine.
source "$PIPELINE_SLURM/sites/local.sh"
export GLOO_SOCKET_IFNAME=lo
