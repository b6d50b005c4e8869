#!/bin/sh
# The man pages, from the programs' own options tables. make-man.sh BIN_DIR OUT_DIR
set -eu
bin=$1 out=$2
mkdir -p "$out"
PARAMSYNC_HELP="man"
export PARAMSYNC_HELP
for program in paramsyncd paramsync-train; do
    [ ! -x "$bin/$program" ] || "$bin/$program" --help >"$out/$program.1"
done
[ -x "$bin/paramsync" ] || exit 0
commands=$("$bin/paramsync" --help | awk '/^Commands:/ { on = 1; next } /^$/ { on = 0 } on { print $1 }')
for command in $commands; do
    "$bin/paramsync" "$command" --help >"$out/paramsync-$command.1"
done
{
    version=$("$bin/paramsync" --version)
    printf '.TH PARAMSYNC 1 "" "%s" "paramsync"\n.nh\n.SH NAME\nparamsync \\- training runs at the command line\n' "$version"
    printf '.SH SYNOPSIS\n\\fBparamsync\\fR COMMAND [RUN] [\\-\\-sidecar HOST:PORT] [options]\n.SH COMMANDS\n'
    "$bin/paramsync" --help | sed -e 's/\\/\\e/g' -e 's/-/\\-/g' | awk '
        /^Commands:/ { on = 1; next }
        /^$/ { on = 0 }
        on { name = $1; $1 = ""; printf ".TP\n\\fB%s\\fR\n%s; see \\fBparamsync\\-%s\\fR(1)\n", name, substr($0, 2), name }'
    printf '.SH DESCRIPTION\n'
    # The paragraph after the commands.
    "$bin/paramsync" --help | sed -e 's/\\/\\e/g' -e 's/-/\\-/g' | awk '/^Commands:/ { seen = 1 } seen && /^$/ { on = 1 } on'
    printf '.SH SEE ALSO\n\\fBparamsyncd\\fR(1), \\fBparamsync\\-train\\fR(1)\n'
} >"$out/paramsync.1"
