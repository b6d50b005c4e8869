# Completion of paramsync, paramsyncd and paramsync-train for bash: the words come from the programs themselves.
_paramsync()
{
    local program=${COMP_WORDS[0]} cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}
    local -a command=()
    local i line name kind values
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        if [[ ${COMP_WORDS[i]} == -- ]]; then # what is launched: a program, then whatever it takes
            compopt -o default
            ((i + 1 < COMP_CWORD)) || mapfile -t COMPREPLY < <(compgen -c -- "$cur")
            return
        fi
    done
    if [[ ${program##*/} == paramsync ]]; then
        if ((COMP_CWORD == 1)); then
            mapfile -t COMPREPLY < <(compgen -W "$("$program" --help 2>/dev/null |
                awk '/^Commands:/ { on = 1; next } /^$/ { on = 0 } on { print $1 }') help --help --version" -- "$cur")
            return
        fi
        command=("${COMP_WORDS[1]}")
        [[ ${command[0]} != -* ]] || return
    fi
    if [[ $prev == --* ]]; then
        while IFS=$'\t' read -r name kind values; do
            [[ ${name//-/_} == "${prev//-/_}" ]] || continue
            case $kind in
            choice) mapfile -t COMPREPLY < <(compgen -W "${values//|/ }" -- "$cur") ;;
            value)
                case $values in
                *FILE* | *PATH*) compopt -o default ;;
                *DIR*) compopt -o dirnames ;;
                esac
                ;;
            *) break ;; # a switch: the next word is free
            esac
            return
        done < <(PARAMSYNC_HELP=words "$program" "${command[@]}" --help 2>/dev/null)
    fi
    if [[ $cur == -* ]]; then
        local words=
        while IFS= read -r line; do
            words+=" ${line%%$'\t'*}"
        done < <(PARAMSYNC_HELP=words "$program" "${command[@]}" --help 2>/dev/null)
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
    else
        compopt -o default
    fi
}
complete -F _paramsync paramsync paramsyncd paramsync-train
