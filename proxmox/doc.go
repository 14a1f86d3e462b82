// Package proxmox makes proxies on one Proxmox VE cluster, or on a single node, by cloning templates. It is a
// [provider.Provider], a [provider.Checker] and a [provider.Warner].
//
// # What is needed
//
//   - Proxmox VE 8 or 9.
//   - A template on each node, or one on shared storage: a VM with cloud-init and the QEMU guest agent inside, or with
//     InstallGuestAgent in the spec and a network from which packages can be installed, made a template by qm template.
//     It needs a disk, net0, and an IDE or SATA slot for the seed. Its own cloud-init drive, if any, is taken out of clones.
//   - A storage with the content type iso on every node, for the seeds: Datacenter, Storage, local usually is one.
//   - A range of VMIDs that nobody else uses: VMIDMin to VMIDMax. Keep it out of datacenter.cfg's next-id.
//   - The endpoint of every node in Nodes, not of a load balancer: seeds are uploaded through the very node that needs them.
//
// # Rights
//
// An API token with privilege separation, and no password. Make a role and give it to user and token (a token has at most
// what its user has):
//
//	agent=VM.GuestAgent.Audit   # on Proxmox VE 8: agent=VM.Monitor
//	pveum role add Egress --privs "VM.Allocate VM.Audit VM.Clone VM.Config.CDROM VM.Config.CPU \
//	    VM.Config.Cloudinit VM.Config.Disk VM.Config.Memory VM.Config.Options VM.PowerMgmt $agent"
//	pveum user add egress@pve
//	pveum user token add egress@pve crawl
//	for who in --users=egress@pve "--tokens=egress@pve!crawl"; do pveum acl modify /vms $who --roles Egress; done
//
// The least privileges, by path:
//
//	/vms                VM.Audit, propagated; VM.Clone at least on the templates
//	/vms, or /pool/P    VM.Allocate, VM.Config.CDROM, .CPU, .Cloudinit, .Disk, .Memory, .Options,
//	                    VM.PowerMgmt, and VM.GuestAgent.Audit (9) or VM.Monitor (8);
//	                    VM.Config.Network with Bridge or VLAN
//	/storage/SEEDS      Datastore.AllocateTemplate to upload, Datastore.Allocate to delete, Datastore.Audit
//	/storage/DISKS      Datastore.AllocateSpace: where the template's disks are, or DiskStorage
//	/sdn/zones/…        SDN.Use on the bridges of the template, or on Bridge
//	/nodes              Sys.Audit
//
// With Config.Pool the second line may be granted on the pool alone. VM.Audit must be on /vms: Proxmox leaves out of its lists
// what a token may not see, without a word, and what is not seen would be made twice. [Provider.Check] names whatever is
// missing.
//
// # Certificates
//
// A node's own certificate is signed by the cluster's authority: give Config.CAFile a copy of /etc/pve/pve-root-ca.pem, or each
// node's Fingerprint as the web interface shows it. Verification can't be turned off. Endpoints are https only: over
// http the token would be in clear on the wire before the redirection.
//
// # Configuration
//
//	Name, Nodes, TokenID, Secret, Templates   required
//	CA, CAFile, Node.Fingerprint              the system's certificates
//	Node.Labels, Node.Drain                   none, false
//	FullClone, DiskStorage                    false, the template's
//	SeedStorage                               local
//	VMIDMin, VMIDMax                          50000, 59999
//	Pool, Tags                                none, the template's
//	Bridge, VLAN                              the template's
//	ClonesPerNode                             2
//	RequestTimeout, TaskTimeout, CloneTimeout 35 s, 2 m, 10 m
//	DialContext, Logger                       net.Dialer's, discards
//
// A spec's Image is a key of Templates, and may be empty when there is one only. CPUs, MemoryMiB and DiskGiB default to the
// template's. Placement.Host is a node; Placement.Group spreads over nodes. There are no Options.
//
// # What it does
//
// An instance is a VM named OWNER--PROXY--GENERATION whose description holds our mark and a number of its own from the moment
// it has a name. VMIDs are picked at random from the range; when somebody else was faster another one is tried, and nothing is
// configured, started or deleted before the VMID has been seen to carry that number. Tags are decoration: Proxmox sorts and
// changes them.
//
// Among the nodes that are allowed the one with the fewest of the group, then the one with the most free memory is taken. The
// seed is uploaded with a digest, its size is read back, and it is attached as a CD-ROM before the start. Creates that were
// interrupted are finished or removed by the next one with the same name.
//
// Whose a VM is, the description says and not the range: instances of an earlier range are still found. A copy of an instance,
// made by hand or restored from a backup under another VMID, is not ours. One that was renamed by hand is not touched any more.
//
// A VM is gone when a node that is with most of the cluster says so, and no list is whole while a node did not answer. A node that
// is down holds up one list by at most 10 s, and those of the next 30 s by a second each.
//
// Delete stops the VM, detaches and deletes the seed and destroys the VM with purge, so that HA, replication and backup jobs
// forget it. The seed goes before the VM, so that a crash in between leaves something that is listed.
//
// When an answer is lost (596, 599, a closed connection), what happened is read from the cluster before anything else is
// done; no request that changes something is ever sent twice, but for uploads, which replace each other. Tasks that end in warnings are successes, and logged as warnings.
// A hibernated VM is never started, since that would resume it instead of booting it.
//
// # Secrets
//
// The seed is an ISO image on SeedStorage: whoever may attach images from there can read it. Prefer documents that fetch their
// secrets, or a storage of its own. The description holds no secret. The token's secret is asked for at the first use and
// after a refusal; neither it nor a document is in any log or error.
//
// # When something is wrong
//
//	CredentialsUnavailable  Config.Secret failed, or gave something that is no secret
//	AuthenticationFailed    wrong TokenID or secret, or the token has expired; Proxmox holds the answer
//	                        back for 3 s
//	PermissionDenied        the message names privilege and path
//	CertificateInvalid      another authority or fingerprint than configured; a renewed certificate has a
//	                        new fingerprint
//	Unreachable             node or pveproxy down, no quorum (pvecm status), or another node can't reach it (595)
//	Timeout                 the node hangs, often on a storage that is gone: pvesm status on the node
//	StorageNotFound         missing, disabled, inactive, or without the content type iso
//	TemplateNotFound        no such VMID or name on that node, or not a template: qm template VMID
//	InsufficientCapacity    memory or storage: the message has the figures
//	QuotaExceeded           the range of VMIDs is used up
//	Unsupported             see the message: protection, hibernation, a linked clone where the storage can't
//	"has the lock clone"    the worker that cloned it was killed; only root can: qm unlock VMID && qm destroy VMID
//	Ready, but no address   the instance's message says what the agent says; "agent: 1" is set by us, the
//	                        agent itself is the guest's
//
// # Known gaps
//
//   - Tested against a model of Proxmox that is held against the published API, not yet against a cluster.
//   - One network interface gets an address: net0. IPv4 is taken first.
//   - A VM that is hidden from the token by NoAccess on its own path, below /vms, counts as gone.
//   - While a node is down, and after a restart of the crawler, a name on that node is not known; an instance made again
//     elsewhere meanwhile is a duplicate for as long as it takes the pool to see and delete it.
package proxmox
