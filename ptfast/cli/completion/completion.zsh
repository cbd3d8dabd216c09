#compdef ptfast
_ptfast() {
    local -a found open
    found=(${(f)"$(ptfast __complete "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    open=(${(M)found:#*[=./]})
    found=(${found:#*[=./]})
    (( $#open )) && compadd -Q -S '' -- $open
    (( $#found )) && compadd -Q -- $found
    (( $#open + $#found )) || _files
}
compdef _ptfast ptfast
