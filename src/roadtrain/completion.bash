# Printed by `roadtrain completion`, with a case for each command.
_roadtrain() {
  local words=
  if [ "$COMP_CWORD" = 1 ]; then
    words="@COMMANDS@"
  else
    case "${COMP_WORDS[1]}" in
@CASES@
    esac
  fi
  case "${COMP_WORDS[COMP_CWORD]}" in
    -*) ;;
    *) [ "$COMP_CWORD" -gt 2 ] && words= ;;  # a file
  esac
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _roadtrain roadtrain
