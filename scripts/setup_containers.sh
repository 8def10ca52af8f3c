#!/usr/bin/env bash
# Makes a container engine for the container tests, apart from any that the machine has: podman and runc
# (installed from Debian if they are missing), with configuration, images and containers of their own below
# OUT (var/containers). Writes OUT/env.sh, to be sourced, and tries to run a container.
#
#     scripts/setup_containers.sh [OUT]
#
# Exit status: 0 ready; 75 this machine cannot run containers: the last line says what is missing.
set -euo pipefail
out=$(realpath -m "${1:-var/containers}")
cannot() { echo "cannot run containers here: $*" >&2; exit 75; }

[ "$(id -u)" = 0 ] || cannot "not root"
for program in podman runc mmdebstrap; do
  command -v "$program" >/dev/null && continue
  command -v apt-get >/dev/null || cannot "$program is not installed, and there is no apt-get"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    podman runc mmdebstrap crun- containernetworking-plugins netavark aardvark-dns iptables >/dev/null
  break
done

mkdir -p "$out/bin"
# Without CAP_SYS_RESOURCE (as in many CI machines) runc may not raise the limits that podman asks for;
# containers do without them.
cat >"$out/bin/runc" <<'PY'
#!/usr/bin/env python3
"""runc, asked for no resource limits and no OOM score: what a machine without CAP_SYS_RESOURCE refuses."""
import json
import os
import shutil
import sys

given = sys.argv[1:]
for option, value in zip(given, given[1:]):
    whole = option in ("-b", "--bundle")  # a container; else --process: a command in one
    if whole or option in ("-p", "--process"):
        path = os.path.join(value, "config.json") if whole else value
        with open(path) as file:
            spec = json.load(file)
        for name in ("rlimits", "oomScoreAdj"):
            (spec["process"] if whole else spec).pop(name, None)
        with open(path, "w") as file:
            json.dump(spec, file)
os.execv(shutil.which("runc", path="/usr/sbin:/usr/bin:/sbin:/usr/local/bin"), ["runc", *given])
PY
chmod +x "$out/bin/runc"
cat >"$out/containers.conf" <<CONF
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[engine.runtimes]
runc = ["$out/bin/runc"]
CONF
cat >"$out/storage.conf" <<CONF
[storage]
driver = "overlay"
graphroot = "$out/storage"
runroot = "$out/run"
CONF
cat >"$out/env.sh" <<CONF
export CONTAINERS_CONF=$out/containers.conf CONTAINERS_STORAGE_CONF=$out/storage.conf
CONF
. "$out/env.sh"

# The probe: an image of one file, on a network of its own.
if ! podman image exists localhost/probe; then
  root=$(mktemp -d)
  mkdir -p "$root/bin" "$root/lib64" "$root/lib/x86_64-linux-gnu"
  cp /bin/true /bin/sleep "$root/bin/"
  ldd /bin/true /bin/sleep | grep -o '/[^ :]*' | while read -r file; do cp --parents -L "$file" "$root"; done
  tar -C "$root" -c . | podman import --quiet - localhost/probe >/dev/null 2>"$out/probe.log" ||
    cannot "podman cannot keep an image: $(tail -1 "$out/probe.log")"
  rm -rf "$root"
fi
podman run --rm --network bridge -p 127.0.0.1::1 localhost/probe /bin/true >"$out/probe.log" 2>&1 ||
  cannot "podman cannot run a container: $(tail -1 "$out/probe.log")"
podman run --rm -d --name capacity-probe localhost/probe /bin/sleep 60 >/dev/null 2>"$out/probe.log" &&
  podman exec capacity-probe /bin/true 2>>"$out/probe.log" ||
  cannot "podman cannot run a command in a container: $(tail -1 "$out/probe.log")"
podman kill capacity-probe >/dev/null
echo "$(podman --version) is ready; its images and containers are in $out"
