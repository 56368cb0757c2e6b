#!/usr/bin/env bash
# Makes sure that a Docker engine answers: nothing to do where one does; on Debian as root it is installed and started.
# Further arguments are programs that must be there too, by the name of their Debian package: .ci/engine.sh docker-compose
set -euo pipefail
say() { printf '%s\n' "engine: $*" >&2; }
log=${TMPDIR:-/tmp}/toolcrib-dockerd.log

socket=${DOCKER_HOST:-unix:///var/run/docker.sock}
answers() { # asks the engine itself: the docker program need not be installed
    python3 - "$socket" <<'PY' 2>/dev/null
import socket, sys
kind, _, place = sys.argv[1].partition("://")
if kind == "unix":
    engine = socket.socket(socket.AF_UNIX); engine.settimeout(5); engine.connect(place)
else:
    host, _, port = place.partition(":"); engine = socket.create_connection((host, int(port or 2375)), 5)
engine.sendall(b"GET /_ping HTTP/1.0\r\nHost: engine\r\n\r\n")
sys.exit(b" 200 " not in engine.recv(64))
PY
}

wait_for_it() {
    for _ in $(seq 1 120); do
        answers && return 0
        sleep 0.5
    done
    return 1
}

install() { # Debian packages, where this may be done
    [ "$#" -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
    say "installing $*"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

missing=()
for program in debootstrap "$@"; do # debootstrap: for a base image where none can be pulled
    command -v "$program" >/dev/null || missing+=("$program")
done
if answers; then
    install "${missing[@]}"
    exit 0
fi

if [ -n "${DOCKER_HOST:-}" ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "no Docker engine answers at $socket."
    say "Start one (https://docs.docker.com/engine/install, or 'sudo systemctl start docker') that this user may use"
    say "('sudo usermod -aG docker \$USER', then log in again), or run this as root on Debian, where it is installed for you."
    exit 5
fi

command -v dockerd >/dev/null || missing+=(docker.io)
command -v iptables >/dev/null || missing+=(iptables)
install "${missing[@]}"

answers && exit 0 # the package may have started it
if [ -d /run/systemd/system ]; then
    systemctl start docker && wait_for_it && exit 0
fi
say "starting dockerd; its log is $log"
rm -f /var/run/docker.pid
setsid nohup dockerd >"$log" 2>&1 </dev/null &
wait_for_it && exit 0
say "dockerd did not come up within 60 s. The end of its log:"
tail -n 15 "$log" >&2
exit 5
