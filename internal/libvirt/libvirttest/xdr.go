package libvirttest

import (
	"encoding/binary"
	"fmt"
	"math"
	"reflect"
)

// encode writes a value as XDR (RFC 4506) has it: everything in words of four bytes, structs field by field, a slice after
// its length. An optional value is a slice of none or one. go-libvirt has no encoder that others may use.
func encode(b []byte, v reflect.Value) []byte {
	switch v.Kind() {
	case reflect.Int8, reflect.Int16, reflect.Int32:
		return binary.BigEndian.AppendUint32(b, uint32(int32(v.Int())))
	case reflect.Uint8, reflect.Uint16, reflect.Uint32:
		return binary.BigEndian.AppendUint32(b, uint32(v.Uint()))
	case reflect.Int64:
		return binary.BigEndian.AppendUint64(b, uint64(v.Int()))
	case reflect.Uint64:
		return binary.BigEndian.AppendUint64(b, v.Uint())
	case reflect.Float64:
		return binary.BigEndian.AppendUint64(b, math.Float64bits(v.Float()))
	case reflect.String:
		b = binary.BigEndian.AppendUint32(b, uint32(v.Len()))
		return pad(append(b, v.String()...), v.Len())
	case reflect.Array:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			for i := range v.Len() {
				b = append(b, byte(v.Index(i).Uint()))
			}
			return pad(b, v.Len())
		}
		for i := range v.Len() {
			b = encode(b, v.Index(i))
		}
		return b
	case reflect.Slice:
		b = binary.BigEndian.AppendUint32(b, uint32(v.Len()))
		for i := range v.Len() {
			b = encode(b, v.Index(i))
		}
		return b
	case reflect.Struct:
		for i := range v.NumField() {
			b = encode(b, v.Field(i))
		}
		return b
	case reflect.Interface:
		return encode(b, v.Elem())
	}
	panic(fmt.Sprintf("libvirttest: no XDR for %s", v.Type()))
}

func pad(b []byte, n int) []byte { return append(b, make([]byte, (4-n%4)%4)...) }

// decoder reads what encode wrote.
type decoder struct {
	b   []byte
	err error
}

func (d *decoder) take(n int) []byte {
	if d.err != nil || n < 0 || len(d.b) < n {
		d.err = fmt.Errorf("want %d bytes and have %d", n, len(d.b))
		return make([]byte, max(min(n, 8), 0))
	}
	taken := d.b[:n]
	d.b = d.b[n:]
	return taken
}

func (d *decoder) word() uint32 { return binary.BigEndian.Uint32(d.take(4)) }

func (d *decoder) decode(v reflect.Value) {
	switch v.Kind() {
	case reflect.Int32:
		v.SetInt(int64(int32(d.word())))
	case reflect.Uint32:
		v.SetUint(uint64(d.word()))
	case reflect.Uint64:
		v.SetUint(binary.BigEndian.Uint64(d.take(8)))
	case reflect.String:
		n := int(d.word())
		text := string(d.take(n))
		d.take((4 - n%4) % 4)
		v.SetString(text)
	case reflect.Array: // of bytes, as there are no others in requests
		reflect.Copy(v, reflect.ValueOf(d.take(v.Len())))
	case reflect.Slice:
		n := int(d.word())
		if n > len(d.b) {
			d.err = fmt.Errorf("want %d elements in %d bytes", n, len(d.b))
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), n, n))
		for i := range n {
			d.decode(v.Index(i))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			d.decode(v.Field(i))
		}
	default:
		d.err = fmt.Errorf("no XDR for %s", v.Type())
	}
}
