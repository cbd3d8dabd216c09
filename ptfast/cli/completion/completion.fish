function __ptfast_complete
    set -l words (commandline -opc) (commandline -ct)
    ptfast __complete $words[2..-1] 2>/dev/null
end
complete -c ptfast -a '(__ptfast_complete)'
