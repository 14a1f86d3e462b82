package gcp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"time"

	"cloud.google.com/go/auth/credentials"
	compute "cloud.google.com/go/compute/apiv1"
	"github.com/googleapis/gax-go/v2"
	"google.golang.org/api/option"
	htransport "google.golang.org/api/transport/http"

	"crawl.example.com/egress/provider"
)

// clients are Google's clients over one transport.
type clients struct {
	instances   *compute.InstancesClient
	operations  *compute.ZoneOperationsClient
	zones       *compute.ZonesClient
	regions     *compute.RegionsClient
	addresses   *compute.AddressesClient
	images      *compute.ImagesClient
	networks    *compute.NetworksClient
	subnetworks *compute.SubnetworksClient
	base        *http.Transport
}

// connected returns the clients, and makes them when there are none.
func (p *Provider) connected(ctx context.Context) (*clients, error) {
	select {
	case p.connecting <- struct{}{}:
		defer func() { <-p.connecting }()
	case <-ctx.Done():
		return nil, &fault{kind: provider.ErrUnavailable, reason: provider.ReasonTimeout, cause: context.Cause(ctx)}
	}
	p.mu.Lock()
	c, closed := p.clients, p.closed
	p.mu.Unlock()
	if closed {
		return nil, &fault{kind: provider.ErrUnavailable, reason: provider.ReasonUnreachable, message: "the provider is closed"}
	}
	if c != nil {
		return c, nil
	}
	c, err := p.connect(ctx)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clients = c
	return c, nil
}

// forget makes the next call read the credentials again.
func (p *Provider) forget(c *clients) {
	p.mu.Lock()
	if p.clients == c {
		p.clients = nil
	}
	p.mu.Unlock()
	c.base.CloseIdleConnections()
}

func (p *Provider) connect(ctx context.Context) (*clients, error) {
	base := http.DefaultTransport.(*http.Transport).Clone()
	silent := slog.New(slog.DiscardHandler)
	// Without a logger of ours an environment variable makes Google's libraries print requests with all metadata, and
	// the exchange of tokens, to standard error.
	options := []option.ClientOption{option.WithLogger(silent), option.WithTelemetryDisabled()}
	if p.config.WithoutAuthentication {
		options = append(options, option.WithoutAuthentication())
	} else {
		content, err := p.credentials(ctx)
		if err != nil {
			return nil, err
		}
		found, err := credentials.DetectDefault(&credentials.DetectOptions{
			//nolint:staticcheck // deprecated for documents from strangers; this one is the operator's own
			Scopes: compute.DefaultAuthScopes(), CredentialsJSON: content, Logger: silent,
		})
		if err != nil {
			// The cause may quote the credentials.
			message := "no Application Default Credentials; set CredentialsFile or Credentials, or run where Google gives them"
			if content != nil {
				message = "the credentials are no JSON key that Google's library reads"
			}
			return nil, &fault{kind: provider.ErrDenied, reason: provider.ReasonCredentialsUnavailable, message: message}
		}
		options = append(options, option.WithAuthCredentials(found))
	}
	if p.config.Endpoint != "" {
		options = append(options, option.WithEndpoint(p.config.Endpoint))
	}
	// The clients outlive this call's context, and so must what fetches their tokens.
	ctx = context.WithoutCancel(ctx)
	authorised, err := htransport.NewTransport(ctx, base, options...)
	if err != nil {
		return nil, &fault{kind: provider.ErrDenied, reason: provider.ReasonCredentialsUnavailable, message: "the transport refuses the credentials"}
	}
	options = []option.ClientOption{
		option.WithLogger(silent), option.WithTelemetryDisabled(), option.WithHTTPClient(&http.Client{Transport: &wire{p, authorised}}),
	}
	if p.config.Endpoint != "" {
		options = append(options, option.WithEndpoint(p.config.Endpoint))
	}
	c := &clients{base: base}
	var errs [8]error
	c.instances, errs[0] = compute.NewInstancesRESTClient(ctx, options...)
	c.operations, errs[1] = compute.NewZoneOperationsRESTClient(ctx, options...)
	c.zones, errs[2] = compute.NewZonesRESTClient(ctx, options...)
	c.regions, errs[3] = compute.NewRegionsRESTClient(ctx, options...)
	c.addresses, errs[4] = compute.NewAddressesRESTClient(ctx, options...)
	c.images, errs[5] = compute.NewImagesRESTClient(ctx, options...)
	c.networks, errs[6] = compute.NewNetworksRESTClient(ctx, options...)
	c.subnetworks, errs[7] = compute.NewSubnetworksRESTClient(ctx, options...)
	if err := errors.Join(errs[:]...); err != nil {
		return nil, &fault{kind: provider.ErrUnavailable, message: "a client can't be made", cause: err}
	}
	return c, nil
}

func (p *Provider) credentials(ctx context.Context) ([]byte, error) {
	unavailable := func(err error) error {
		return &fault{kind: provider.ErrDenied, reason: provider.ReasonCredentialsUnavailable, message: "credentials can't be read", cause: err}
	}
	switch {
	case p.config.Credentials != nil:
		content, err := p.config.Credentials(ctx)
		if err == nil && len(content) == 0 {
			err = errors.New("they are empty")
		}
		if err != nil {
			return nil, unavailable(err)
		}
		return content, nil
	case p.config.CredentialsFile != "":
		content, err := os.ReadFile(p.config.CredentialsFile)
		if err != nil {
			return nil, unavailable(err)
		}
		return content, nil
	}
	return nil, nil
}

// call is what the log says about a request.
type call struct {
	method  string
	target  string
	attempt int
	fields  string // which fields of the answer are wanted; empty means all
}

type callKey struct{}

// errNotSent marks a request that never left.
var errNotSent = errors.New("not sent")

// wire is the transport under Google's clients: it paces, narrows and logs. It sits above the one that adds the
// authorization, so that it never sees any.
type wire struct {
	p    *Provider
	next http.RoundTripper
}

func (w *wire) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx := r.Context()
	info, _ := ctx.Value(callKey{}).(call)
	if err := w.p.pace.Wait(ctx); err != nil {
		return nil, fmt.Errorf("%w: waiting for a request's turn: %w", errNotSent, err)
	}
	if info.fields != "" {
		r = r.Clone(ctx)
		q := r.URL.Query()
		q.Set("fields", info.fields)
		r.URL.RawQuery = q.Encode()
	}
	begin := time.Now()
	resp, err := w.next.RoundTrip(r)
	level, status := slog.LevelDebug, 0
	if resp != nil {
		status = resp.StatusCode
	}
	if err != nil || status >= 400 && status != http.StatusNotFound && status != http.StatusConflict {
		level = slog.LevelWarn
	}
	attributes := []slog.Attr{
		slog.String("method", info.method), slog.String("target", info.target), slog.Int("attempt", info.attempt),
		slog.Int("status", status), slog.Duration("duration", time.Since(begin)),
	}
	if err != nil {
		attributes = append(attributes, slog.String("error", classify(err).Error()))
	}
	w.p.config.Logger.LogAttrs(ctx, level, "compute request", attributes...)
	return resp, err
}

const (
	// attempts is how often one request is sent at most within a call; the pool repeats the call itself.
	attempts = 4
	// firstPause doubles from try to try.
	firstPause = 200 * time.Millisecond
	// requestTimeout bounds one try. Compute answers within a second, or within its own limit of 30 s.
	requestTimeout = 30 * time.Second
)

// once tells Google's clients to send one request for one call: their own retries hide the cause of a failure behind
// a deadline.
var once = []gax.CallOption{gax.WithRetry(nil)}

// do sends a request with retries. Whatever happens, the last answer's fault is in the error.
func (p *Provider) do(ctx context.Context, info call, timeout time.Duration, send func(context.Context, *clients) error) error {
	pause := firstPause
	ambiguous := false
	for info.attempt = 1; ; info.attempt++ {
		f := p.try(ctx, info, timeout, send)
		if f == nil {
			return nil
		}
		ambiguous = ambiguous || f.ambiguous
		f.ambiguous = ambiguous
		wait := max(pause/2+rand.N(pause), f.retryAfter)
		if !f.retry || info.attempt == attempts || ctx.Err() != nil || wait > requestTimeout {
			return f
		}
		if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < wait {
			return f
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			f.cause = errors.Join(f.cause, context.Cause(ctx))
			return f
		}
		pause *= 2
	}
}

func (p *Provider) try(ctx context.Context, info call, timeout time.Duration, send func(context.Context, *clients) error) *fault {
	if ctx.Err() != nil {
		return &fault{kind: provider.ErrUnavailable, reason: provider.ReasonTimeout, message: "not sent", cause: context.Cause(ctx)}
	}
	c, err := p.connected(ctx)
	if err != nil {
		return classify(err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("no answer within %s: %w", timeout, context.DeadlineExceeded))
	defer cancel()
	err = send(context.WithValue(ctx, callKey{}, info), c)
	if err == nil {
		return nil
	}
	f := classify(err)
	if f.reason == provider.ReasonAuthenticationFailed {
		p.forget(c)
	}
	if ctx.Err() != nil && f.code == 0 && f.cause != nil && !strings.Contains(f.cause.Error(), context.Cause(ctx).Error()) {
		f.cause = errors.Join(f.cause, context.Cause(ctx))
	}
	return f
}
