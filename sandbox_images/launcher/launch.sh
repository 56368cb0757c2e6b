# Runs as: tini -- busybox sh launch.sh PROGRAM [ARGUMENT ...]
#
# Reads the secrets from the first lines of stdin, "NAME base64" each, up to a line ".", so that they stand neither in the
# container's configuration nor in the environment of PID 1. Then says "ready" as the first line of stdout, or "failed" and
# why, and becomes the program: all that follows on stdin and stdout is the program's own. No code of the image runs before.
# Our variables begin with an underscore each and are unset, so that the program's environment is what the image wants.

_fail() {
    printf 'failed %s\n' "$1"
    exit 127
}

while IFS= read -r _line && [ "$_line" != . ]; do
    # the x keeps newlines at the end of a value
    _value=$(printf %s "${_line#* }" | base64 -d && printf x) || _fail "A secret did not arrive whole."
    export "${_line%% *}=${_value%x}"
done
[ "$_line" = . ] || _fail "The secrets did not arrive whole."

_program=$1
shift
case $_program in
*/*) ;;
'') _fail "Its command is empty." ;;
*)
    # by hand: this shell would take programs of its own for those of the image
    _found=
    _left=${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}:
    while [ -n "$_left" ]; do
        _folder=${_left%%:*}
        _left=${_left#*:}
        if [ -f "${_folder:-.}/$_program" ] && [ -x "${_folder:-.}/$_program" ]; then
            _found=${_folder:-.}/$_program
            break
        fi
    done
    [ -n "$_found" ] || _fail "There is no program '$_program' in it."
    _program=$_found
    ;;
esac
[ -e "$_program" ] || _fail "There is no program '$_program' in it."
[ -f "$_program" ] || _fail "'$_program' is no program."
[ -x "$_program" ] || _fail "'$_program' may not be run by the sandbox's user (uid 10001)."

# The shell would read what the kernel can't run as a script of its own, so the kind of file is looked at first.
_kind() { dd if="$1" bs=20 count=1 2>/dev/null | od -An -v -tx1 | tr -d ' \n'; }
_magic=$(_kind "$_program")
case $_magic in
'') ;; # it can't be read, but perhaps be run
7f454c46*)
    # bytes 18 and 19: the processor. 0300 is that of 32 bit programs, which many processors of 64 bits run too
    _ours=$(_kind /proc/self/exe | cut -c 37-40)
    _is=$(printf %s "$_magic" | cut -c 37-40)
    [ "$_is" = "$_ours" ] || [ "$_is" = 0300 ] ||
        _fail "'$_program' is for another processor than this one (exec format error)."
    ;;
2321*)
    IFS= read -r _line <"$_program"
    _line=${_line#??}
    _line=${_line#"${_line%%[! 	]*}"}
    _line=${_line%%[ 	]*}
    [ -e "$_line" ] || _fail "'$_program' is a script for '$_line', which is not in it."
    ;;
*) _fail "'$_program' is no program that can be run here (exec format error)." ;;
esac

trap 'printf "%s could not be run\n" "$_program" >&2' EXIT
printf 'ready\n'
unset _line _value _found _left _folder _magic _ours _is OLDPWD SHLVL
exec "$_program" "$@"
