#!/usr/bin/env bash
# Builds a cloud image out of Debian's packages, which is what the live tests' guests boot from: UEFI, cloud-init that
# reads a NoCloud seed, squid, the guest agent. The finished image is kept as guest-<digest of this script>.qcow2 in the
# given folder, whose path is the last line of the output.
#
#	guest.sh FOLDER
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin" LC_ALL=C
self=$(readlink -f "$0")
folder=$(mkdir -p "$1" && readlink -f "$1")
suite=bookworm
image=$folder/guest-$(sha256sum "$self" | cut -c1-16).qcow2

exec 9>"$folder/guest.lock"
flock 9 # two builders at once would do the work twice
if [ -e "$image" ]; then
	echo "$image"
	exit
fi
rm -f "$folder"/guest-*.qcow2
work=$(mktemp -d "$folder/build.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"

mmdebstrap --quiet --variant=minbase \
	--include=systemd-sysv,linux-image-cloud-amd64,cloud-init,qemu-guest-agent,squid,netplan.io,iproute2,udev,dbus,ca-certificates,curl,cloud-guest-utils,e2fsprogs \
	"$suite" root.tar >&2
mkdir root
tar -C root -xf root.tar --exclude='./dev/*' --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' --exclude='./usr/share/locale/*' --exclude='./var/cache/apt/*'
rm root.tar

# Nothing in the guest waits for a network that isn't there, and nothing but the seed configures it.
cat >root/etc/cloud/cloud.cfg.d/90_egress.cfg <<-'EOF'
	datasource_list: [ NoCloud, None ]
	ssh_genkeytypes: [ ed25519 ]
	manage_etc_hosts: true
EOF
for unit in apt-daily.timer apt-daily-upgrade.timer fstrim.timer e2scrub_all.timer logrotate.timer dpkg-db-backup.timer systemd-networkd-wait-online.service; do
	ln -sf /dev/null "root/etc/systemd/system/$unit"
done
# squid is started by the seed's user data, once it has written the configuration.
rm -f root/etc/systemd/system/multi-user.target.wants/squid.service
: >root/etc/machine-id
rm -f root/etc/resolv.conf root/etc/hostname
: >root/etc/resolv.conf
echo 'LABEL=cloudimg-rootfs / ext4 defaults 0 1' >root/etc/fstab

kernel=$(echo root/boot/vmlinuz-*) initrd=$(echo root/boot/initrd.img-*)
echo -n 'root=LABEL=cloudimg-rootfs ro console=ttyS0 net.ifnames=0 quiet' >cmdline
cp root/etc/os-release osrel
cp "$kernel" linux
cp "$initrd" initrd
rm -rf root/boot/*
# Without a boot loader the kernel, its command line and its initrd are one program for the firmware.
objcopy --add-section .osrel=osrel --change-section-vma .osrel=0x20000 \
	--add-section .cmdline=cmdline --change-section-vma .cmdline=0x30000 \
	--add-section .linux=linux --change-section-vma .linux=0x2000000 \
	--add-section .initrd=initrd --change-section-vma .initrd=0x4000000 \
	/usr/lib/systemd/boot/efi/linuxx64.efi.stub boot.efi

esp=64 rootfs=1400 # MiB
truncate -s ${esp}M esp.img
mkfs.vfat -n ESP esp.img >&2
mmd -i esp.img ::EFI ::EFI/BOOT
mcopy -i esp.img boot.efi ::EFI/BOOT/BOOTX64.EFI
mke2fs -q -t ext4 -L cloudimg-rootfs -d root rootfs.img ${rootfs}M >&2
truncate -s $((esp + rootfs + 4))M disk.img
sfdisk --quiet disk.img >&2 <<-EOF
	label: gpt
	start=1MiB, size=${esp}MiB, type=U
	start=$((esp + 2))MiB, size=${rootfs}MiB, type=L
EOF
dd if=esp.img of=disk.img bs=1M seek=1 conv=notrunc,sparse status=none
dd if=rootfs.img of=disk.img bs=1M seek=$((esp + 2)) conv=notrunc,sparse status=none
qemu-img convert -O qcow2 disk.img image.qcow2
mv image.qcow2 "$image"
echo "$image"
