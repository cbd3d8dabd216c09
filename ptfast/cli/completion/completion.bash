_ptfast() {
    local line="${COMP_LINE:0:$COMP_POINT}" words word prefix
    read -ra words <<< "$line"
    [[ "$line" == *" " ]] && words+=("")
    word="${words[${#words[@]} - 1]}"
    COMPREPLY=($(ptfast __complete "${words[@]:1}" 2>/dev/null))
    # Readline completes what follows the last `=` or `:`, so the part before it must go.
    prefix="${word%"${word##*[=:]}"}"
    COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
    [[ "${#COMPREPLY[@]}" == 1 && "${COMPREPLY[0]}" == *[=./] ]] && compopt -o nospace
}
complete -o default -F _ptfast ptfast
