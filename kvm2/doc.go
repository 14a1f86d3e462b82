// Package kvm2 makes proxies on a fleet of libvirt hosts, as one provider. It is a [provider.Provider], a
// [provider.Checker] and a [provider.Warner].
//
// What a host needs, the rights, images, what an instance is, and what the reasons mean, is the same as with one host: see
// [crawl.example.com/egress/kvm]. This is what is different.
//
// # Configuration
//
//	Name                     required; it is in the names of bases: base-NAME-IMAGE.qcow2
//	Hosts                    required; each with Name and URI
//	SSH                      known hosts and SSH agent of the user; for hosts without their own
//	Images, Firmware         none, uefi; the same for all hosts
//	AllowEmulation           false
//	Autostart, IPv6          false, false
//	ShutdownGrace            0
//	MaxUploads, FetchOnHost  2, false
//	HTTPClient               one of its own
//	ListTimeout              5 s
//	HostBackoff              30 s
//	Progress, Logger         none, discards
//
// Each host has besides: SSH, Labels, Weight (1), Cordoned, Drained, StoragePool (default), Network (default), Bridge,
// MaxInstances, MaxCPUs, MaxMemoryMiB (what it has less 512) and MinFreeGiB (1).
//
// # Where an instance goes
//
// Placement.Host and Placement.Labels say where it may go. Among those hosts the ones with the fewest instances of the same
// Placement.Group come first, or with the fewest of the owner when there is no group; then those without another instance of the
// same proxy; then those with the most room, by memory and processors, times Weight. A host on which a create has failed comes
// after all others for HostBackoff and longer. Ties are broken by names, the same way each time. The instance's
// message says why it is where it is, and an error why each host did not take it. provider.ErrNoCapacity means that every host
// that is allowed is full or cordoned.
//
// # A host that is away
//
// Every host is asked at once and for itself. One that does not answer within ListTimeout is named in a
// provider.PartialError; what is on it is unknown to the pool, which replaces it once its probes fail. From the second time on a host
// that is away is waited for half a second only. A create goes to the next host, unless it may have been carried out. When the
// host is back, the pool sees what it had forgotten and deletes what it has replaced meanwhile.
//
// # Taking a host out of service
//
// Set Drained and call [Provider.SetHosts]: the pool replaces what is on the host elsewhere, creating before it deletes. When
// the host is empty take it out of Hosts. Cordoned only keeps new instances away. A host's Name is part of the instances' ids, so
// it is not for another machine to take while there are any.
//
// # Known gaps
//
//   - Those of package kvm.
//   - Each host gets its own copy of an image, through this process or by itself; hosts don't pass images on.
//   - Room is counted by what all virtual machines of a host may use, not by load.
package kvm2
