# Any cluster without a file of its own: the virtual environment that tools/install made, and Slurm's own PMI-2 for MPI.
if [ -f .venv/bin/activate ]; then source .venv/bin/activate; fi
export SLURM_MPI_TYPE=pmi2
