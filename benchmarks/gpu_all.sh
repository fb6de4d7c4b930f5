#!/usr/bin/env bash
# Most of what docs say about one GPU, measured in one go: about 45 minutes, an hour at most. Output: FOLDER/PART.txt, and
# FOLDER/results/*.jsonl, a line for every measurement as soon as it is made.
#
#     bash benchmarks/gpu_all.sh FOLDER [PART ...]
#
# Parts: pong (beside Stable-Baselines3), kernels, learner, pong_time, breakout, beam_rider. Each has a limit, at which it reports what it has.
set -u
mkdir -p "${1:?a folder for the output}/results" && out=$(realpath "$1") || exit 1
shift
wanted=" ${*:-pong kernels learner pong_time breakout beam_rider} "
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export QFLEET_RESULTS=$out/results PYTHONUNBUFFERED=1

part() {  # NAME LIMIT ARGUMENTS...
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    [[ $wanted == *" $name "* ]] || return 0
    timeout -s INT -k 60 "$limit" "$python" "$@" > "$out/$name.txt" 2>&1
    echo "$name: exit $?, $((SECONDS - began)) s"
}

part pong 450 benchmarks/gpu_pong.py --seconds 3 --sb3 3
part kernels 200 -m pytest -p no:benchmark -n 8 tests/kernels tests/runtime/test_streams.py
part learner 330 benchmarks/gpu_learner.py
part pong_time 700 benchmarks/gpu_pong_time.py
part breakout 700 benchmarks/gpu_atari.py breakout --limit 680 --set runtime.eval_every=2500000
part beam_rider 800 benchmarks/gpu_atari.py beam_rider --limit 780 --set runtime.eval_every=2500000 env.sticky_actions=0
tail -n 5 "$out"/*.txt
