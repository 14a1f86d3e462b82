// Package gcp makes proxies on Google Cloud Compute Engine. It is a [provider.Provider], a [provider.Checker] and a
// [provider.Warner], in a module of its own because of what Google's client brings along.
//
// # What is needed
//
//   - A project with the Compute Engine API enabled and billing set up.
//   - Credentials: Application Default Credentials, Config.CredentialsFile or Config.Credentials. On Google's own
//     machines an attached service account is the best of these, since it has no key that can be lost.
//   - An image with cloud-init and the Google guest agent, or with the proxy built in.
//   - A firewall rule as below.
//
// # Rights
//
// A custom role with these is enough:
//
//	compute.instances.create, .get, .list, .delete, .setLabels, .setMetadata, .setTags
//	compute.disks.create, .setLabels
//	compute.subnetworks.use, compute.subnetworks.useExternalIp, compute.networks.get
//	compute.subnetworks.get                            with Config.Subnetwork
//	compute.addresses.list, compute.addresses.use      with ExternalStatic
//	compute.images.get, .getFromFamily, .useReadOnly   on images of the own project; Google's are public
//	compute.zoneOperations.get, compute.zones.get, compute.regions.get
//
// compute.instances.setDeletionProtection is not needed. Neither is iam.serviceAccounts.actAs: instances are made
// without a service account, and one that has one all the same is deleted again and reported, because whoever breaks
// into the proxy could act as that account. Do not grant project-wide roles such as Editor.
//
// # An open proxy is found within hours
//
// This package makes no firewall rules. An instance with an external address is reached on the proxy's port only if a
// rule lets it be; one that lets everybody in makes an open proxy, whose abuse is laid at your project's door. Allow the
// crawler's own addresses and nobody else, by a network tag:
//
//	gcloud compute firewall-rules create crawler-proxies --network=default --direction=INGRESS \
//	    --allow=tcp:3128 --source-ranges=203.0.113.7/32 --target-tags=crawler-proxy
//
// Set Config.Tags to that tag. Restrict the proxy itself too, by address or by password.
//
// # Configuration
//
//	Name, Project, Zones      required
//	DrainZones                none; zones that are listed and deleted from, but get nothing new
//	Spread                    false; begin with the first zone, not with one picked by name
//	Image                     DefaultImage, an Ubuntu with cloud-init
//	MachineType, DiskType     e2-micro, pd-balanced
//	Network, Subnetwork       default, none
//	Tags, Labels              none
//	External                  ephemeral; or static with StaticAddresses, or none
//	IPv6, NetworkTier         false, the project's
//	Spot, SpotTermination     false, DELETE
//	DeletionProtection        false
//	BootstrapCloudInit        false
//	CredentialsFile           Application Default Credentials; or Credentials, a function
//	Endpoint                  Google's; WithoutAuthentication only for another one
//	RequestsPerSecond         10
//	OperationTimeout          5 minutes
//	Logger                    discards
//
// A spec's Image overrides Config.Image. CPUs and MemoryMiB pick the cheapest E2 type that has both; Options takes
// "machine-type", "disk-type" and "spot" instead. Placement.Host is a zone; Placement.Labels knows "zone" and "region";
// a Placement.Group spreads its instances over the zones.
//
// # Images and cloud-init
//
// The user data reaches the guest byte for byte under the metadata key user-data, in base64 with user-data-encoding when
// it is not text. Google takes 262,144 bytes a value and less than 512 KiB for all, so binary documents end at 192 KiB.
//
// Google's Debian images have no cloud-init, and user data does nothing on them. BootstrapCloudInit installs it with
// apt in the first boot and boots once more. Ubuntu's images have it.
//
// Google has no vendor data. A vendor document that is a script, with #! at its start, goes into startup-script; it runs
// once, as root, after cloud-init has finished, which is later than on other backends, and again at the next boot if it
// failed. Any other vendor document is refused, and so is a static network configuration. InstallGuestAgent does
// nothing: images have Google's own agent.
//
// # What it does
//
// An instance carries owner, proxy, generation, hash and hash version in labels that start with "egress-". Whatever lacks
// one of them is never touched. Create looks for the name in every zone, then tries the zones in order until one
// has room, and waits for the operation's end, not for the boot. The request id follows from the mark, so that a process
// that crashed and asks again gets the first one's answer. Delete asks for the labels first, and refuses what has deletion
// protection. Lists and gets leave metadata out.
//
// Only RUNNING counts as running. A Spot instance that was taken away is missing from the next list, or TERMINATED with
// SpotTermination STOP. An ephemeral address changes when an instance is stopped and started, and is read anew.
//
// Each request is logged at debug level with method, target, attempt, status and duration, and at warning level when
// it failed. Neither metadata nor authorization is ever logged, not even with Google's GOOGLE_SDK_GO_LOGGING_LEVEL.
//
// # When something is wrong
//
//	CredentialsUnavailable  no credentials, or they can't be read: see the message
//	AuthenticationFailed    Google refused them: key deleted, account disabled, clock wrong
//	PermissionDenied        a right above is missing, the API is off, or an organisation's constraint
//	                        forbids it (constraints/compute.vmExternalIpAccess: use ExternalNone)
//	QuotaExceeded           regional quota used up: raise it or add a region. With RetryAfter: too many
//	                        requests; lower RequestsPerSecond or have other users slow down
//	InsufficientCapacity    no zone has machines: add zones or types, or turn Spot off; or no static
//	                        address is free
//	ImageNotFound           Config.Image or the spec's: misspelt, deleted, or not shared with the project
//	Unreachable             zone down, or no way to the endpoint
//	Timeout                 no answer in time; an accepted create goes on and is found by the next list
//	CertificateInvalid      something between here and Google breaks TLS open
//	Unsupported             see the message; deletion protection is cleared by
//	                        gcloud compute instances update NAME --zone=ZONE --no-deletion-protection
//	Ready, but probes fail  firewall rule, tag, or user data: see
//	                        gcloud compute instances get-serial-port-output NAME
//
// # Known gaps
//
//   - It has been tested against a fake that holds all traffic against Google's own API description, not against Google.
//   - While one zone's API does not answer, creates fail in all zones, since the name might be taken there. Move the zone
//     out of Zones and DrainZones to go on without it.
//   - A zone that is in neither is not looked at, and what is in it is not seen.
//   - One interface, one disk; no GPU, no reservations, no instance groups, no customer-managed keys.
//   - With Config.IPv6 the proxy is still reached by IPv4. The IPv6 address serves its connections to sites.
//   - A static address is found by a list of the region's addresses for each create.
//
// # What it costs to build
//
// Measured with Go 1.26.8 on two cores, the standard library compiled: a program that imports the root package
// alone builds in 1.3 s to 9.1 MB (6.3 MB stripped). With this package it takes 49 s and 1.4 GB of memory the first
// time, and comes to 36.0 MB (24.9 MB stripped), with 79 lines of go.sum and 32 modules. Those who import the root and
// other backends get none of that.
package gcp
