#!/usr/bin/env bash
# Most of what docs say about one GPU, measured in one go: 28 minutes at most, since every part has a limit. Its output is FOLDER/PART.txt.
#
#     bash benchmarks/gpu_all.sh FOLDER
#
# Games are made slowly (512 of them in 20 s), so the rates share one program. Tests of the kernels run beside Breakout.
set -u
mkdir -p "${1:?a folder for the output}" && out=$(realpath "$1") || exit 1
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

part() {  # NAME LIMIT ARGUMENTS...
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    timeout -s INT -k 20 "$limit" "$python" "$@" > "$out/$name.txt" 2>&1
    echo "$name: exit $?, $((SECONDS - began)) s"
}

many="env.num_envs=256 runtime.steps_per_round=1024 runtime.eval_every=2500000 learner.lr_schedule=linear"
part sb3 60 benchmarks/pong_steps.py --one sb3 --device cuda
part pong 330 benchmarks/gpu_pong.py --quick --seconds 8 --envs 512
part kernels 400 -m pytest -p no:benchmark -n 4 tests/kernels tests/runtime/test_streams.py &
part breakout 640 benchmarks/gpu_atari.py breakout --limit 600 --set $many
part beam_rider 640 benchmarks/gpu_atari.py beam_rider --limit 600 --set $many env.sticky_actions=0
wait
tail -n 5 "$out"/*.txt
