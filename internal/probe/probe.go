// Package probe sends one request through a proxy and says whether the proxy works, and if not, why.
package probe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"crawl.example.com/egress/internal/upstream"
)

// Check says what proves that a proxy works.
type Check struct {
	// URL is requested through the proxy. Empty means that a connection to the proxy is proof enough.
	URL string
	// Method is the request's method. Empty means GET.
	Method string
	// Status is the status wanted. Zero means any from 200 to 399.
	Status int
	// Body must be in the first MaxBody bytes of the answer. Empty means no condition.
	Body string
	// EchoURL answers with the address it was asked from. Empty means that the address is not learned.
	EchoURL string
	// Timeout bounds the whole probe. Zero leaves it to the context.
	Timeout time.Duration
}

// MaxBody is how much of an answer's body is looked at, in bytes.
const MaxBody = 64 << 10

// Reason is a word for the outcome, stable enough for alerts.
type Reason string

// The reasons.
const (
	ReasonOK          Reason = "OK"
	ReasonRefused     Reason = "Refused"     // the proxy's port is closed
	ReasonUnreachable Reason = "Unreachable" // no way to the proxy
	ReasonTimeout     Reason = "Timeout"     // no answer in time
	ReasonProxyAuth   Reason = "ProxyAuth"   // 407: the credentials for the proxy are refused
	ReasonTLS         Reason = "TLS"         // a handshake failed, with the proxy or behind it
	ReasonDNSAtProxy  Reason = "DNSAtProxy"  // the proxy can't resolve the probe's host name
	ReasonProxyError  Reason = "ProxyError"  // the proxy answered that it could not do it
	ReasonWrongStatus Reason = "WrongStatus" // an answer came, with another status than wanted
	ReasonWrongBody   Reason = "WrongBody"   // an answer came, without the wanted text
	ReasonInterrupted Reason = "Interrupted" // the connection ended in the middle
	ReasonCanceled    Reason = "Canceled"    // the caller gave up; says nothing about the proxy
	ReasonUnknown     Reason = "Unknown"
)

// Result is the outcome of one probe.
type Result struct {
	// OK is true when the proxy proved that it works.
	OK bool
	// Reason is ReasonOK exactly when OK is true.
	Reason Reason
	// Message says it in a sentence, without any credentials.
	Message string
	// Duration is how long it took.
	Duration time.Duration
	// EgressIP is the address that the echo URL saw. Invalid when it was not asked or gave none.
	EgressIP netip.Addr
}

// Do probes one proxy over fresh connections, so that a kept-alive connection can't hide a proxy that no longer
// accepts new ones. It blocks until the probe has ended, at the latest when its timeout or ctx ends.
func Do(ctx context.Context, endpoint upstream.Endpoint, check Check) Result {
	start := time.Now()
	if check.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, check.Timeout)
		defer cancel()
	}
	transport := upstream.NewTransport(endpoint)
	transport.DisableKeepAlives = true
	defer transport.CloseIdleConnections()

	var result Result
	if check.URL == "" {
		result = connect(ctx, endpoint)
	} else {
		result = request(ctx, transport, check)
	}
	if result.OK && check.EchoURL != "" {
		ip, err := echo(ctx, transport, check.EchoURL)
		if err != nil {
			result.Message = "works, but its egress address is not known: " + err.Error()
		}
		result.EgressIP = ip
	}
	result.Duration = time.Since(start)
	return result
}

func request(ctx context.Context, transport *http.Transport, check Check) Result {
	method := check.Method
	if method == "" {
		method = http.MethodGet
	}
	req, err := http.NewRequestWithContext(ctx, method, check.URL, nil)
	if err != nil {
		return Result{Reason: ReasonUnknown, Message: err.Error()}
	}
	req.Header.Set("User-Agent", "egress-probe/1")
	answer, err := transport.RoundTrip(req)
	if err != nil {
		return failure(err)
	}
	defer answer.Body.Close()
	if result, bad := wrongStatus(answer, check.Status); bad {
		return result
	}
	if check.Body == "" {
		return Result{OK: true, Reason: ReasonOK, Message: fmt.Sprintf("answered %d", answer.StatusCode)}
	}
	body, err := io.ReadAll(io.LimitReader(answer.Body, MaxBody))
	if err != nil {
		return failure(err)
	}
	if !bytes.Contains(body, []byte(check.Body)) {
		return Result{Reason: ReasonWrongBody, Message: fmt.Sprintf(
			"the first %d bytes of the body do not contain %q", len(body), check.Body)}
	}
	return Result{OK: true, Reason: ReasonOK, Message: fmt.Sprintf("answered %d with the wanted body", answer.StatusCode)}
}

func wrongStatus(answer *http.Response, want int) (Result, bool) {
	got := answer.StatusCode
	if got == want || want == 0 && got >= 200 && got < 400 {
		return Result{}, false
	}
	wanted := "200 to 399"
	if want != 0 {
		wanted = fmt.Sprint(want)
	}
	switch {
	case got == http.StatusProxyAuthRequired:
		return Result{Reason: ReasonProxyAuth, Message: "the proxy refused the credentials with 407"}, true
	case upstream.SaysDNSFailure(answer.Header):
		return Result{Reason: ReasonDNSAtProxy, Message: "the proxy can't resolve the probe's host name"}, true
	}
	return Result{Reason: ReasonWrongStatus, Message: fmt.Sprintf("answered %d, want %s", got, wanted)}, true
}

// connect proves a proxy without a URL: the port is open and, where the protocol has a greeting, greets.
func connect(ctx context.Context, endpoint upstream.Endpoint) Result {
	conn, err := upstream.Connect(ctx, endpoint)
	if err != nil {
		return failure(err)
	}
	conn.Close()
	return Result{OK: true, Reason: ReasonOK, Message: "accepts connections"}
}

func echo(ctx context.Context, transport *http.Transport, url string) (netip.Addr, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return netip.Addr{}, err
	}
	answer, err := transport.RoundTrip(req)
	if err != nil {
		return netip.Addr{}, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return netip.Addr{}, fmt.Errorf("the echo URL answered %d", answer.StatusCode)
	}
	body, err := io.ReadAll(io.LimitReader(answer.Body, 4<<10))
	if err != nil {
		return netip.Addr{}, err
	}
	return parseEcho(body)
}

// parseEcho finds the first address in an echo service's answer: bare, or as the one string in a small JSON
// or HTML document.
func parseEcho(body []byte) (netip.Addr, error) {
	words := strings.FieldsFunc(string(body), func(r rune) bool {
		return !strings.ContainsRune("0123456789abcdefABCDEF.:", r)
	})
	for _, word := range words {
		if !strings.ContainsAny(word, ".:") {
			continue
		}
		for _, candidate := range []string{word, strings.Trim(word, ".:")} {
			if ip, err := netip.ParseAddr(candidate); err == nil {
				return ip.Unmap(), nil
			}
		}
	}
	return netip.Addr{}, errors.New("the echo URL's answer holds no address")
}

var reasons = map[upstream.Kind]Reason{
	upstream.KindRefused:     ReasonRefused,
	upstream.KindUnreachable: ReasonUnreachable,
	upstream.KindTimeout:     ReasonTimeout,
	upstream.KindAuth:        ReasonProxyAuth,
	upstream.KindTLS:         ReasonTLS,
	upstream.KindTargetDNS:   ReasonDNSAtProxy,
	upstream.KindProxyStatus: ReasonProxyError,
	upstream.KindInterrupted: ReasonInterrupted,
	upstream.KindCanceled:    ReasonCanceled,
}

func failure(err error) Result {
	reason, ok := reasons[upstream.Classify(err)]
	if !ok {
		reason = ReasonUnknown
	}
	return Result{Reason: reason, Message: upstream.Text(err)}
}
