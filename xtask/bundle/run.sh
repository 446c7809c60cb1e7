#!/usr/bin/env bash
# Runs what `cargo xtask bundle` packed, on a machine without Rust. Called from the root of the repository, whose tree
# holds the model and the fixtures; needs bash, tar and xz (or Python 3 in place of both).
set -euo pipefail
shopt -s nullglob

usage() {
    cat <<'END'
usage: run.sh list                              what is in the bundle
       run.sh tests [-t NAME]… [FILTER…] [-- OPTIONS]
                                                test programs (all, or those whose name has NAME in it); FILTER and
                                                OPTIONS are those of the test harness
       run.sh PROGRAM ARGUMENTS…                any other program, from the root of the repository
  BUNDLE_WRAP='compute-sanitizer --tool memcheck --error-exitcode 9' is put in front of every program
END
    exit 2
}

[ $# -gt 0 ] || usage
bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(pwd -P)
if ! [ -f "$root/Cargo.toml" ] || ! [ -d "$root/ninfer-kernels" ]; then
    echo "run.sh: $root is not the root of the repository" >&2
    exit 2
fi

# Unpacks once for each archive, and not beside it: what is copied to the machine stays small.
archive=("$bundle"/programs.tar.*)
mark=$(cksum <"${archive[0]}")
unpacked=${TMPDIR:-/tmp}/ninfer-bundle-$(id -u)
if [ "$(cat "$unpacked/mark" 2>/dev/null)" != "$mark" ]; then
    rm -rf "$unpacked"
    mkdir -p "$unpacked"
    tar -xf "${archive[0]}" -C "$unpacked" 2>"$unpacked/errors" || python3 -m tarfile -e "${archive[0]}" "$unpacked" ||
        { cat "$unpacked/errors" >&2; exit 1; }
    chmod +x "$unpacked"/*/*
    echo "$mark" >"$unpacked/mark"
fi

# Programs look for the model and the fixtures below the folder in which they were built.
built=$(cat "$unpacked/root")
if [ -L "$built" ]; then
    [ "$(readlink -f "$built")" = "$root" ] || ln -sfn "$root" "$built"
elif [ ! -e "$built" ]; then
    mkdir -p "$(dirname "$built")" && ln -s "$root" "$built" ||
        echo "run.sh: $built cannot be made, so that fixtures will not be found" >&2
elif [ "$(cd "$built" && pwd -P)" != "$root" ]; then
    echo "run.sh: fixtures are read from $built, which is another folder than $root" >&2
fi

# shellcheck disable=SC2206 # the words of a command line
wrap=(${BUNDLE_WRAP:-})

run_tests() {
    local names=() filters=() failed=() log seconds status
    local passed_all=0 failed_all=0 skipped_all=0
    while [ $# -gt 0 ]; do
        case $1 in
            -t) [ $# -gt 1 ] || usage; names+=("$2"); shift 2 ;;
            --) shift; filters+=("$@"); break ;;
            *) filters+=("$1"); shift ;;
        esac
    done
    log=$(mktemp)
    # shellcheck disable=SC2064 # the name of now
    trap "rm -f '$log'" EXIT
    for program in "$unpacked"/tests/*; do
        # ninfer-kernels.cuda is the test target `cuda` of the package `ninfer-kernels`.
        local name=${program##*/} wanted=${#names[@]}
        for part in ${names[@]+"${names[@]}"}; do
            [[ $name != *"$part"* ]] || wanted=0
        done
        [ "$wanted" -eq 0 ] || continue
        seconds=$SECONDS status=0
        (cd "$root/${name%%.*}" && ${wrap[@]+"${wrap[@]}"} "$program" ${filters[@]+"${filters[@]}"}) >"$log" 2>&1 || status=$?
        # shellcheck disable=SC2016 # awk's own
        read -r passed lost < <(awk '/^test result: / { p += $4; f += $6 } END { print p + 0, f + 0 }' "$log")
        # The harness counts a test that was skipped as passed. Its line may stand behind the name of another test.
        skipped=$(grep -c 'GPU test skipped (' "$log" || true)
        passed=$((passed > skipped ? passed - skipped : 0))
        printf '%-32s %5d passed %4d failed %4d skipped %5d s' "$name" "$passed" "$lost" "$skipped" $((SECONDS - seconds))
        if [ "$status" -ne 0 ]; then
            printf '   exit status %d\n' "$status"
            failed+=("$name")
            # What the harness says of the failures; without it, how the program ended.
            if grep -q '^failures:' "$log"; then sed -n '/^failures:/,$p' "$log" | head -n 200; else tail -n 40 "$log"; fi
        else
            echo
            [ "${#wrap[@]}" -eq 0 ] || tail -n 2 "$log"
        fi
        passed_all=$((passed_all + passed)) failed_all=$((failed_all + lost)) skipped_all=$((skipped_all + skipped))
    done
    echo "$passed_all tests passed, $failed_all failed, $skipped_all skipped for want of a GPU${failed[*]:+; failed: ${failed[*]}}"
    [ "${#failed[@]}" -eq 0 ]
}

case $1 in
    list)
        (cd "$unpacked" && ls -l tests programs | awk 'NF > 2 { printf "%8d KiB  %s\n", $5 / 1024, $NF } NF == 1 { print }')
        ;;
    tests)
        shift
        run_tests "$@"
        ;;
    -*) usage ;;
    *)
        program=$unpacked/programs/$1
        [ -x "$program" ] || { echo "run.sh: the bundle has no program $1" >&2; usage; }
        shift
        exec ${wrap[@]+"${wrap[@]}"} "$program" "$@"
        ;;
esac
