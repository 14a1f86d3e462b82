package cloudinit

import (
	"encoding/binary"
	"fmt"
	"strings"
)

// Seed is the content of a NoCloud seed image.
type Seed struct {
	// UserData is the file user-data. Required, as far as cloud-init is concerned: without the file it does not take
	// the image for a seed, so an empty one is written when it is nil.
	UserData []byte
	// MetaData is the file meta-data. Required.
	MetaData []byte
	// VendorData is the file vendor-data. Defaults to no such file.
	VendorData []byte
	// NetworkConfig is the file network-config. Defaults to no such file.
	NetworkConfig []byte
}

// MaxSeedFile is the size in bytes above which a file of a seed is refused. The largest limit of a backend for user data
// is a fraction of it.
const MaxSeedFile = 64 << 20

const (
	sectorSize = 2048
	// Where things are, in sectors. ECMA-119 keeps the first 16 free.
	descriptorAt = 16
	terminatorAt = 17
	littlePathAt = 18
	bigPathAt    = 19
	rootAt       = 20
	filesAt      = 21
)

// ISO returns the seed as an ISO 9660 image with the label cidata and Rock Ridge names, in whole sectors. The same seed
// always gives the same bytes. It is built in memory, because the documents hold secrets that have no business on a
// disk of ours, and because there may be no disk: kdomanski/iso9660, which reads such images in our tests, writes through
// a temporary directory, and stamps them with the time.
func (s Seed) ISO() ([]byte, error) {
	if len(s.MetaData) == 0 {
		return nil, fmt.Errorf("cloudinit: seed: MetaData is empty, want what MetaData.Render returns")
	}
	// In the order of their identifiers, as ECMA-119 wants them.
	files := []isoFile{{name: "meta-data", data: s.MetaData}}
	if s.NetworkConfig != nil {
		files = append(files, isoFile{name: "network-config", data: s.NetworkConfig})
	}
	files = append(files, isoFile{name: "user-data", data: s.UserData})
	if s.VendorData != nil {
		files = append(files, isoFile{name: "vendor-data", data: s.VendorData})
	}
	next := uint32(filesAt)
	for i := range files {
		f := &files[i]
		if len(f.data) > MaxSeedFile {
			return nil, fmt.Errorf("cloudinit: seed: %s has %d bytes, want at most %d", f.name, len(f.data), MaxSeedFile)
		}
		f.sector = next
		next += uint32((len(f.data) + sectorSize - 1) / sectorSize)
	}
	image := make([]byte, int(next)*sectorSize)
	at := func(sector uint32) []byte { return image[int(sector)*sectorSize:] }
	writeDescriptor(at(descriptorAt), next)
	copy(at(terminatorAt), "\xffCD001\x01")
	copy(at(littlePathAt), pathTable(binary.LittleEndian))
	copy(at(bigPathAt), pathTable(binary.BigEndian))
	writeRoot(at(rootAt)[:sectorSize], files)
	for _, f := range files {
		copy(at(f.sector), f.data)
	}
	return image, nil
}

type isoFile struct {
	name   string
	data   []byte
	sector uint32
}

// both32 writes a number in both byte orders, as most numbers of ECMA-119 are.
func both32(b []byte, n uint32) {
	binary.LittleEndian.PutUint32(b, n)
	binary.BigEndian.PutUint32(b[4:], n)
}

func both16(b []byte, n uint16) {
	binary.LittleEndian.PutUint16(b, n)
	binary.BigEndian.PutUint16(b[2:], n)
}

func padded(b []byte, text string) {
	copy(b, text+strings.Repeat(" ", len(b)-len(text)))
}

// writeDescriptor writes the primary volume descriptor, ECMA-119 section 8.4. The dates are those that say "not given".
func writeDescriptor(b []byte, sectors uint32) {
	copy(b, "\x01CD001\x01")
	padded(b[8:40], "LINUX")
	padded(b[40:72], "cidata")
	both32(b[80:], sectors)
	both16(b[120:], 1) // volumes
	both16(b[124:], 1) // this one
	both16(b[128:], sectorSize)
	both32(b[132:], uint32(len(pathTable(binary.LittleEndian))))
	binary.LittleEndian.PutUint32(b[140:], littlePathAt)
	binary.BigEndian.PutUint32(b[148:], bigPathAt)
	copy(b[156:190], directoryRecord("\x00", rootAt, sectorSize, true, nil))
	padded(b[190:813], "")
	for _, date := range []int{813, 830, 847, 864} {
		copy(b[date:], "0000000000000000\x00")
	}
	b[881] = 1
}

// pathTable has the root directory alone, ECMA-119 section 9.4.
func pathTable(order binary.ByteOrder) []byte {
	b := make([]byte, 10)
	b[0] = 1
	order.PutUint32(b[2:], rootAt)
	order.PutUint16(b[6:], 1)
	return b
}

// directoryRecord returns a record of ECMA-119 section 9.1 with extra as its system use area.
func directoryRecord(id string, sector, size uint32, directory bool, extra []byte) []byte {
	n := 33 + len(id) + (len(id)+1)%2
	b := make([]byte, n+len(extra)+len(extra)%2)
	b[0] = byte(len(b))
	both32(b[2:], sector)
	both32(b[10:], size)
	copy(b[18:], "\x64\x01\x01\x00\x00\x00\x00") // 2000-01-01, always
	if directory {
		b[25] = 2
	}
	both16(b[28:], 1)
	b[32] = byte(len(id))
	copy(b[33:], id)
	copy(b[n:], extra)
	return b
}

// Modes of stat(2) in Rock Ridge's PX entries. Readable by root alone, whoever mounts it.
const (
	modeDirectory = 0o040500
	modeFile      = 0o100400
)

// posix is Rock Ridge's PX entry: mode and number of links, of user and group 0.
func posix(mode, links uint32) []byte {
	b := make([]byte, 36)
	copy(b, "PX\x24\x01")
	both32(b[4:], mode)
	both32(b[12:], links)
	return b
}

// writeRoot writes the root directory: itself twice, as . and .., and the files.
func writeRoot(b []byte, files []isoFile) {
	// SP says that there are system use entries, ER that they are Rock Ridge's.
	self := append([]byte("SP\x07\x01\xbe\xef\x00"), posix(modeDirectory, 2)...)
	self = append(self, "ER\x12\x01\x0a\x00\x00\x01RRIP_1991A"...)
	b = b[copy(b, directoryRecord("\x00", rootAt, sectorSize, true, self)):]
	b = b[copy(b, directoryRecord("\x01", rootAt, sectorSize, true, posix(modeDirectory, 2))):]
	for _, f := range files {
		extra := append([]byte{'N', 'M', byte(5 + len(f.name)), 1, 0}, f.name...)
		extra = append(extra, posix(modeFile, 1)...)
		// Without Rock Ridge the kernel makes the same name of the identifier: lower case, without the version.
		id := strings.ToUpper(f.name) + ".;1"
		b = b[copy(b, directoryRecord(id, f.sector, uint32(len(f.data)), false, extra)):]
	}
}
