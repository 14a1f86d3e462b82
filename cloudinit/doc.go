// Package cloudinit makes and checks the documents that a guest's cloud-init reads, and the NoCloud seed image that
// carries them. All of it is pure: no files, no clock, no network, the same bytes for the same input.
//
// # Byte for byte
//
// The operator's user data is never parsed, merged or re-encoded: it is the file user-data of the seed. What cloud-init
// would silently ignore or destroy is refused beforehand by [CheckUserData].
//
// # What is ours
//
// The library's own part, the installation of the guest agent, travels as vendor-data and is a plain shell script.
// cloud-init merges cloud-config from both sides, which drops whole keys of one of them; a script is just run, after the
// packages of the user data are installed and before its runcmd and scripts. See [VendorData].
//
// No error of this package shows the content of a document.
package cloudinit
