#!/usr/bin/env bash
# Native saves of a training state beside `dd` of as many bytes, both durable when they end.
#
#   bench/native_save.sh DIR [MIB [RUNS]]
#
# DIR is a directory on the disk to measure; what this makes in it is removed. The programs alternate, so that
# all meet the same disk; the figures are medians. Nothing else should run on the machine.
set -euo pipefail

dir=${1:?usage: bench/native_save.sh DIR [MIB [RUNS]]}
mib=${2:-1024}
runs=${3:-5}
bench=${NATIVE_SAVE_BENCH:-target/release/examples/native_save_bench}
[ -x "$bench" ] || cargo build --release -p fsdp-ckpt --example native_save_bench

work=$(mktemp -d "$dir/native-save.XXXXXX")
trap 'rm -rf "$work"' EXIT

dd_seconds() {
    # From a file in the page cache, as the state is in memory.
    local begin end
    begin=$(date +%s.%N)
    dd if="$work/source" of="$work/dd" bs=1M conv=fsync status=none
    end=$(date +%s.%N)
    rm "$work/dd"
    awk "BEGIN { print $end - $begin }"
}

save_seconds() {
    "$bench" "$work/run$1" "$1" "$mib" | awk '{ print $5 }'
    rm -rf "$work/run$1"
}

median() { sort -g "$1" | awk '{ v[NR] = $1 } END { print (v[int((NR + 1) / 2)] + v[int((NR + 2) / 2)]) / 2 }'; }

dd if=/dev/urandom of="$work/source" bs=1M count="$mib" status=none
sync
for _ in $(seq "$runs"); do
    dd_seconds >> "$work/dd.txt"
    save_seconds 1 >> "$work/1.txt"
    save_seconds 2 >> "$work/2.txt"
done
dd_median=$(median "$work/dd.txt")
echo "$mib MiB, medians of $runs runs"
echo "dd bs=1M conv=fsync: $dd_median s"
for ranks in 1 2; do
    save=$(median "$work/$ranks.txt")
    awk "BEGIN { printf \"%d rank(s): %.3f s, %.0f %% of the speed of dd\n\", $ranks, $save, 100 * $dd_median / $save }"
done
