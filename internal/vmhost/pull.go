package vmhost

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"

	golibvirt "github.com/digitalocean/go-libvirt"

	"crawl.example.com/egress/internal/libvirt"
	"crawl.example.com/egress/internal/sshconn"
	"crawl.example.com/egress/provider"
)

// pull has the host fetch the image itself, into a volume that exists. The URL goes to curl's standard input, where other
// users of the host don't see it.
func (h *Host) pull(ctx context.Context, vol golibvirt.StorageVol, target string, image Image, free int64) (sizes, error) {
	var size sizes
	err := h.pool.Do(ctx, h.config.Target, func(ctx context.Context, conn *libvirt.Conn) error {
		_, want := digestOf(image)
		algorithm, declared, _ := strings.Cut(want, ":")
		if algorithm == "" {
			algorithm = "sha256"
		}
		config := fmt.Sprintf("url = %s\noutput = %s\n", curlQuote(image.URL), curlQuote(target))
		redirects := "=http,https"
		if u, err := url.Parse(image.URL); err == nil && u.Scheme == "https" {
			redirects = "=https" // as imageClient has it
		}
		command := fmt.Sprintf("curl --config - --fail --silent --show-error --location --proto '=http,https' --proto-redir '"+redirects+"' "+
			"--speed-limit 1 --speed-time %d --max-filesize %d && %ssum -- %s && stat -c %%s -- %s",
			int(stallTimeout.Seconds()), free, algorithm, shellQuote(target), shellQuote(target))
		out, _, err := conn.SSH().Run(ctx, command, strings.NewReader(config))
		if err != nil {
			return pullFault(err, showURL(image.URL))
		}
		fields := strings.Fields(string(out))
		if len(fields) != 3 {
			return fault(provider.ErrUnavailable, provider.ReasonUnknown, "the host said %q after fetching the image", out[:min(len(out), 200)])
		}
		got := strings.TrimPrefix(fields[0], `\`) // sha256sum marks names that it had to escape
		if declared != "" && got != declared {
			return fault(provider.ErrPermanent, provider.ReasonImageNotFound,
				"%s has %s %s, and the configuration says %s; if the image was meant to change, give it a new name in Images with the new digest", showURL(image.URL), algorithm, got, declared)
		}
		if size.bytes, err = strconv.ParseInt(fields[2], 10, 64); err != nil {
			return fault(provider.ErrUnavailable, provider.ReasonUnknown, "the host said %q for the size of the image", fields[2])
		}
		return conn.Do(ctx, func(s *libvirt.Session) error {
			var header bytes.Buffer
			if err := s.StorageVolDownload(vol, &header, 0, headerBytes, 0); err != nil {
				return &libvirt.StreamError{Err: err}
			}
			capacity, err := checkHeader(header.Bytes()[:min(header.Len(), headerBytes)], image.Format)
			if err != nil {
				return fault(provider.ErrPermanent, provider.ReasonImageNotFound, "%s %v", showURL(image.URL), err)
			}
			if image.Format == formatRaw {
				capacity = uint64(size.bytes)
			}
			size.capacity = capacity
			return nil
		})
	})
	return size, err
}

// pullFault reads curl's exit status (curl(1), EXIT CODES).
func pullFault(err error, shown string) error {
	exit, ok := errors.AsType[*sshconn.ExitError](err)
	if !ok {
		return err
	}
	switch exit.Status {
	case 127:
		return fault(provider.ErrUnavailable, provider.ReasonUnsupported, "the host has no curl, which FetchOnHost needs")
	case 22:
		if strings.Contains(exit.Stderr, "410") {
			return fault(provider.ErrPermanent, provider.ReasonImageNotFound, "get %s: %s", shown, exit.Stderr)
		}
	case 23:
		return fault(provider.ErrUnavailable, provider.ReasonPermissionDenied, "the host can't write the image: %s; the SSH user needs the right to write into the storage pool's folder", exit.Stderr)
	case 63:
		return fault(provider.ErrNoCapacity, provider.ReasonInsufficientCapacity, "the image does not fit into the storage pool")
	}
	return fault(provider.ErrUnavailable, provider.ReasonImageNotFound, "the host could not get %s: %s", shown, exit.Stderr)
}

// curlQuote makes a quoted word of text for curl's configuration.
func curlQuote(text string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`, "\r", `\r`, "\t", `\t`).Replace(text) + `"`
}

// shellQuote makes one word of text for a shell.
func shellQuote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }
