#!/usr/bin/env bash
# Run make targets on a fresh, minimal Debian, as a user without rights, with nothing but Python, venv, make and git:
#
#     tests/fresh_machine.sh TARGET ...        for example: tests/fresh_machine.sh demo test
#
# FRESH_SUITE   bookworm (Debian 12, Python 3.11.2; the default) or trixie (Debian 13, Python 3.13)
# FRESH_ROOT    folder of the machine, which is kept and used again; by default a new one, which is removed at the end
# FRESH_NO_SHM  1: /dev/shm cannot be written, as in small containers
# FRESH_WHEELS  folder of wheels beside the package index; by default that of PIP_FIND_LINKS
#
# Needs root, mounts, debootstrap (installed if missing) and a package index. The committed state is tested.
set -euo pipefail
if (($# < 1)); then
	sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
	exit 2
fi
# Mounts in a namespace of their own end with this script.
if [[ -z ${FRESH_MOUNTS:-} ]]; then
	unshare --mount true 2> /dev/null || {
		echo "expected root and the right to mount, got user $(id -un): run it as root in a container with CAP_SYS_ADMIN" >&2
		exit 2
	}
	FRESH_MOUNTS=1 exec unshare --mount "$0" "$@"
fi
repository=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
suite=${FRESH_SUITE:-bookworm} wheels=${FRESH_WHEELS:-${PIP_FIND_LINKS:-}}
root=${FRESH_ROOT:-$(mktemp -d)}
mkdir -p "$root"
chmod 755 "$root" # its user has to enter it
[[ -n ${FRESH_ROOT:-} ]] || trap 'umount -l "$root"/{wheels,dev/shm,proc} 2> /dev/null || true; rm -rf --one-file-system "$root"' EXIT

if [[ ! -e $root/home/user ]]; then
	start=$SECONDS log=$(mktemp)
	command -v debootstrap > /dev/null || { apt-get update -qq && apt-get install -qq -y debootstrap; } > /dev/null
	mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2> /dev/null | grep -oE 'https?://[^ ]+/debian/?( |$)' | head -n 1 || true)
	debootstrap --variant=minbase --include=python3,python3-venv,make,git,ca-certificates \
		"$suite" "$root" ${mirror:+"$mirror"} > "$log" 2>&1 || {
		tail "$log" >&2
		echo "expected debootstrap to install FRESH_SUITE=$suite, bookworm or trixie: see above" >&2
		exit 2
	}
	rm "$log"
	chroot "$root" useradd --create-home user
	echo "built $suite in $((SECONDS - start)) s: $(chroot "$root" python3 --version)"
fi

found=$(. "$root/etc/os-release" && echo "$VERSION_CODENAME")
[[ $found == "$suite" ]] || {
	echo "expected FRESH_ROOT=$root to be $suite, got $found: remove it" >&2
	exit 2
}

# What the network needs: names, certificates, proxies and pip's index. Nothing else of this machine is seen.
cp /etc/resolv.conf /etc/hosts "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
variables=(HOME=/home/user USER=user LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin TERM=dumb PIP_DISABLE_PIP_VERSION_CHECK=1
	PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt)
index=${PIP_INDEX_URL:-$(pip config get global.index-url 2> /dev/null || true)}
[[ -z $index ]] || variables+=("PIP_INDEX_URL=$index")
for name in {http,https,no}_proxy {HTTP,HTTPS,NO}_PROXY PIP_TRUSTED_HOST PIP_DEFAULT_TIMEOUT; do
	[[ -z ${!name:-} ]] || variables+=("$name=${!name}")
done
mkdir -p "$root"/{proc,dev/shm,wheels}
mount -t proc proc "$root/proc"
[[ ${FRESH_NO_SHM:-0} == 1 ]] && chmod 755 "$root/dev/shm" || mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
if [[ -d $wheels ]]; then
	mount --bind "$wheels" "$root/wheels"
	variables+=(PIP_FIND_LINKS=/wheels)
fi
rm -rf "$root/home/user/project"
git clone --quiet --no-hardlinks "$repository" "$root/home/user/project"
chroot "$root" chown -R user:user /home/user/project
for target in "$@"; do
	start=$SECONDS status=0
	env -i "${variables[@]}" "$(command -v chroot)" --userspec=user:user "$root" make --no-print-directory -C /home/user/project "$target" || status=$?
	echo "make $target: exit status $status, $((SECONDS - start)) s, $(du -sm "$root/home/user/project/.venv" 2> /dev/null | cut -f1) MB in .venv"
	((status == 0)) || exit "$status"
done
