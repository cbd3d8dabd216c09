#!/bin/bash
#SBATCH --job-name=ptfast-resnet-cifar
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=h100:8
#SBATCH --time=04:00:00
#SBATCH --partition=gpu
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --requeue

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=0 --cpus-per-task=$SLURM_CPUS_PER_TASK /venv/bin/python -m ptfast train recipe=resnet_cifar optimizer.lr=0.1 'trust=[mine]' run.dir=/shared/runs/mine parallel=ddp parallel.nproc=8 run.resume=auto parallel.nnodes=2 parallel.rdzv="$head:$((20000 + SLURM_JOB_ID % 10000))" &
training=$!
trap 'kill -USR1 $training' USR1
wait $training
code=$?
# The warning ends the wait, not the training.
if [ $code -eq $((128 + $(kill -l USR1))) ]; then wait $training; code=$?; fi
if [ $code -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
