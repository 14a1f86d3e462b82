// Package kvm makes proxies on one libvirt host with KVM. It is a [provider.Provider], a [provider.Checker] and a
// [provider.Warner]. For many hosts in one provider see
// [crawl.example.com/egress/kvm2].
//
// # What the host needs
//
//   - libvirt 7.2 or newer with QEMU for x86_64: on Debian and Ubuntu the packages libvirt-daemon-system,
//     qemu-system-x86 and ovmf. The one daemon of old, libvirtd, and the newer virtqemud are both fine.
//   - A storage pool that is a folder, active and with autostart, as below.
//   - A network or a bridge that the crawler can reach. libvirt's own network "default" is NAT: its guests are reached only
//     from the host itself. From elsewhere, use Config.Bridge, or a network with <forward mode='route'/> and a route to it.
//   - SSH for a user who is root or in the group libvirt, unless the host is this machine. libvirt's socket is reached through
//     sshd's forwarding of sockets (AllowStreamLocalForwarding, on by default), else by virt-ssh-helper or nc, at half the
//     speed.
//
// A storage pool is made with:
//
//	virsh pool-define-as default dir --target /var/lib/libvirt/images
//	virsh pool-start default
//	virsh pool-autostart default
//
// # Rights
//
// Whoever may write to libvirt's socket is root on that host, as far as it matters. Give the crawler a key of its own, and no
// shell if you can do without FetchOnHost. The host's key is verified unless you ask for it not to be: put it into
// known_hosts, or pin it. On each connection the command true is started, which has sshd answer at once from then on; what
// becomes of it does not matter.
//
// # Configuration
//
//	Name, URI                  required
//	Host, Labels               Name, none; what Placement is compared with
//	SSH                        known hosts and SSH agent of the user
//	StoragePool                default
//	Network, Bridge            default, none
//	Images, Firmware           none, uefi
//	AllowEmulation, Autostart  false, false
//	IPv6                       false; the address that the proxy is reached by
//	ShutdownGrace              0; instances are switched off at once
//	MaxInstances, MaxCPUs      no bound
//	MaxMemoryMiB               what the host has less 512
//	MinFreeGiB                 1
//	FetchOnHost, HTTPClient    false, one of its own
//	Progress, Logger           none, discards
//
// A spec's Image is a name in Images or a URL, with "sha256" and "format" in Options for the latter. "firmware" in Options
// overrides the image's. CPUs and MemoryMiB default to 1 and 512, DiskGiB to the image's size.
//
// # Images
//
// An image needs cloud-init and a network that asks for an address. It is streamed from its URL into the storage pool, never to
// a disk of ours, and verified on the way. What is cut short, too long, of another digest, or no image at all is deleted again and
// was never visible as a base. A broken download is taken up again where it broke off. Whatever the number of creates, an
// image is fetched once for a host, two at a time.
//
// On the host a base is two volumes: one that begins with base-NAME. and ends with .img holds the data, and base-NAME.qcow2 on
// top of it is what disks are made on; NAME is the first 16 digits of the URL's SHA-256 for an image that was given as one. A
// base is never overwritten: when Images has another digest than the base was made from, creates fail for good and say both.
// Give the new image a new name, such as debian-13-20261201; the proxies then roll over to it, and [Provider.EvictImages]
// deletes the old one. A qcow2 image that refers to other files is refused, since QEMU would show the guest any file of the
// host.
//
// # What it does
//
// An instance is a domain named OWNER--PROXY--GENERATION with our mark in its metadata, and files in the storage pool that
// begin with the domain's name: disk, seed and serial log. The domain is defined before its files are made, and undefined
// after they are deleted, so that what a crash leaves is still listed and removed. Domains without our mark are never touched,
// whatever their name, and neither are those of another owner.
//
// The seed is a read-only virtio disk: Debian's cloud kernel has no driver for SATA. Firmware is UEFI without secure boot,
// or BIOS. The hardware address follows from the name. Without KVM, AllowEmulation starts the instance emulated.
//
// The address comes from the guest agent, else from the network's DHCP leases, else from the host's neighbour table.
// cloud-init can install the agent, see InstallGuestAgent; on a bridge it is what finds the address. An agent that hangs is
// given up after three seconds and asked again half a minute later.
//
// # When something is wrong
//
//	CredentialsUnavailable  on our side: no key, no passphrase, an unreadable known_hosts, or an agent that
//	                        is not there, refuses, or does not answer in time
//	AuthenticationFailed    sshd refused every key: see authorized_keys on the host
//	CertificateInvalid      the host's key is unknown or has changed: the message has its fingerprint
//	                        and says what to do
//	PermissionDenied        the user may not use libvirt's socket: usermod -aG libvirt USER
//	Unreachable             no way to the host, or libvirtd does not run: systemctl status libvirtd
//	Timeout                 libvirtd does not answer: virsh hangs on the host too
//	StorageNotFound         the storage pool is missing or not active
//	NetworkNotFound         the network is missing or not active
//	ImageNotFound           the URL can't be got, is no image, or has another digest
//	InsufficientCapacity    pool full, memory or a bound used up: the message has the figures
//	Unsupported             no UEFI firmware, no KVM, libvirt too old, or a pool that is no folder
//	Ready, but probes fail  see the serial log in the pool's folder; its name begins with the instance's
//	                        and ends with .log
//
// An instance that is paused, suspended or hibernated is not fit, and its message says which. The pool replaces it.
//
// # Known gaps
//
//   - x86_64 only. One interface and one disk.
//   - qemu+tls and qemu+tcp are not spoken, and sessions (qemu:///session) are not used.
//   - Images are unpacked from gzip only; use qcow2, which is packed inside, instead.
//   - The bound on memory counts what domains may use, not what they do.
//   - Where libvirt's logs are not kept by virtlogd (stdio_handler = "file"), a guest can fill the pool with its serial log.
package kvm
