#!/bin/sh
# First process of the ToolServer's container: least rights that reach the engine's socket, a key, the tool images, the server.
set -eu
state=${TOOLSERVER_STATE_DIR:-/state}
socket=/var/run/docker.sock
say() { printf '%s\n' "toolserver: $*" >&2; }

if [ "$(id -u)" = 0 ] && [ "${TOOLSERVER_RIGHTS_SETTLED:-}" = "" ]; then
    export TOOLSERVER_RIGHTS_SETTLED=1
    group=$(stat -c %g "$socket" 2>/dev/null || echo 0)
    mode=$(stat -c %A "$socket" 2>/dev/null || echo s---------)
    case "$mode" in
        s???rw*)
            if [ "$group" != 0 ]; then
                chown -R 10002:10002 "$state"
                exec setpriv --reuid 10002 --regid 10002 --groups "$group" --no-new-privs "$0" "$@"
            fi
            ;;
    esac
    say "runs as root: the engine's socket is open to root alone (group $group, $mode)"
fi
unset TOOLSERVER_RIGHTS_SETTLED

if [ -z "${TOOLSERVER_API_KEY:-}" ]; then
    if ! [ -s "$state/admin.key" ]; then
        (umask 077 && python -c 'import secrets; print("tk_" + secrets.token_urlsafe(32))' > "$state/admin.key")
        say "an admin key was made. To see it: docker compose exec toolserver cat $state/admin.key"
    fi
    TOOLSERVER_API_KEY=$(cat "$state/admin.key")
    export TOOLSERVER_API_KEY
fi

# Beside the server, for it takes minutes the first time; until then sessions are answered 503 with Retry-After. What is up to
# date is left alone, so an update of the server brings its images up to date, too.
if toolserver images list --json 2>/dev/null | grep -q '"up_to_date": false'; then
    say "some of the tool images are missing or out of date: building them now"
    (toolserver images build || say "the tool images could not be built; see above, then: docker compose exec toolserver toolserver images build") &
fi

exec toolserver serve "$@"
