// Package guestsite is what the examples' test hosts have in the place of the internet: the guests' image, a page, and the
// document that makes a proxy of a guest.
package guestsite

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"
)

// Squid makes a proxy of a test host's guest, which has squid installed already. It takes its time to look for its own name,
// which no server here knows, unless it is told.
const Squid = `#cloud-config
write_files:
  - path: /etc/squid/squid.conf
    content: |
      http_port 3128
      visible_hostname proxy
      shutdown_lifetime 1 seconds
      acl crawler src 10.231.0.0/16
      http_access allow crawler
      http_access deny all
      cache deny all
runcmd:
  - systemctl restart --no-block squid
`

// Serve serves the image as /image.qcow2, and /page, on one of this machine's addresses until end is called.
func Serve(address, image string) (url string, end func() error, err error) {
	l, err := net.Listen("tcp", net.JoinHostPort(address, "0"))
	if err != nil {
		return "", nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/image.qcow2", func(w http.ResponseWriter, r *http.Request) { http.ServeFile(w, r, image) })
	mux.HandleFunc("/page", func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprintf(w, "hello %s, by way of %q\n", r.RemoteAddr, r.Header.Get("Via"))
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(l) }() // until Close
	return "http://" + l.Addr().String(), server.Close, nil
}

// Digest returns the SHA-256 of a file in hexadecimal.
func Digest(file string) (_ string, err error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}
