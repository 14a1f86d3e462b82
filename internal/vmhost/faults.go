package vmhost

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"

	golibvirt "github.com/digitalocean/go-libvirt"

	"crawl.example.com/egress/internal/hostpool"
	"crawl.example.com/egress/internal/libvirt"
	"crawl.example.com/egress/internal/sshconn"
	"crawl.example.com/egress/provider"
)

// Fault is an error with what the pool should do about it.
type Fault struct {
	Kind    error
	Reason  provider.Reason
	Message string
}

// Error returns the message.
func (f *Fault) Error() string { return f.Message }

func fault(kind error, reason provider.Reason, format string, args ...any) *Fault {
	return &Fault{kind, reason, fmt.Sprintf(format, args...)}
}

// isAnswer reports whether err says nothing against the connection it came over.
func isAnswer(err error) bool {
	_, ours := errors.AsType[*Fault](err)
	_, stream := errors.AsType[*libvirt.StreamError](err)
	return ours || stream || libvirt.Answered(err) || sshconn.Local(err)
}

// judge makes a Fault of any error. What was under way when the connection broke or the context ended is the caller's to
// know: it is taken to be a question here, which changed nothing.
func judge(err error) *Fault {
	if f, ok := errors.AsType[*Fault](err); ok {
		return f
	}
	f := &Fault{Kind: provider.ErrUnavailable, Reason: provider.ReasonUnknown, Message: err.Error()}
	_, refused := errors.AsType[*sshconn.AuthError](err)
	_, credentials := errors.AsType[*sshconn.CredentialsError](err)
	_, hostKey := errors.AsType[*sshconn.HostKeyError](err)
	switch {
	case refused || credentials || hostKey:
		// These first: what their cause says of a file is about ours and nothing of the host's.
		f.Kind, f.Reason = provider.ErrDenied, sshconn.Reason(err)
	case libvirt.Denied(err):
		f.Kind, f.Reason = provider.ErrDenied, provider.ReasonPermissionDenied
		f.Message += "; the user needs the group libvirt or a polkit rule"
	case errors.Is(err, sshconn.ErrSocketDenied), socketDenied(err):
		f.Kind, f.Reason = provider.ErrDenied, provider.ReasonPermissionDenied
		f.Message += "; the user needs the group libvirt"
	case libvirt.Full(err):
		f.Kind, f.Reason = provider.ErrNoCapacity, provider.ReasonInsufficientCapacity
		f.Message = "the storage pool is full: " + f.Message
	case libvirt.Code(err) != 0:
		f.Reason, f.Kind = answer(libvirt.Code(err))
	case errors.Is(err, golibvirt.ErrUnsupported):
		f.Kind, f.Reason = provider.ErrPermanent, provider.ReasonUnsupported
		f.Message = "this libvirt is too old: " + f.Message
	case errors.Is(err, libvirt.ErrNoSocket):
		f.Reason = provider.ReasonUnreachable
	default:
		f.Reason = sshconn.Reason(err)
		if errors.Is(err, context.Canceled) && f.Reason == provider.ReasonUnreachable {
			f.Reason = provider.ReasonTimeout
		}
		if errors.Is(err, hostpool.ErrClosed) {
			f.Message = errClosed.Error()
		}
	}
	return f
}

// socketDenied reports whether this machine's own libvirt may not be talked to. The same error from a dial to a host is a
// firewall's.
func socketDenied(err error) bool {
	dial, ok := errors.AsType[*net.OpError](err)
	return ok && dial.Net == "unix" && errors.Is(err, os.ErrPermission)
}

// answer says what libvirt's own errors mean where nothing more particular is known.
func answer(code golibvirt.ErrorNumber) (provider.Reason, error) {
	switch code {
	case golibvirt.ErrNoDomain:
		return provider.ReasonUnknown, provider.ErrNotFound
	case golibvirt.ErrNoStoragePool:
		return provider.ReasonStorageNotFound, provider.ErrUnavailable
	case golibvirt.ErrNoNetwork:
		return provider.ReasonNetworkNotFound, provider.ErrUnavailable
	case golibvirt.ErrXMLError, golibvirt.ErrXMLDetail, golibvirt.ErrXMLInvalidSchema, golibvirt.ErrConfigUnsupported:
		return provider.ReasonUnsupported, provider.ErrPermanent
	case golibvirt.ErrNoMemory:
		return provider.ReasonInsufficientCapacity, provider.ErrNoCapacity
	case golibvirt.ErrOperationTimeout, golibvirt.ErrAgentUnresponsive:
		return provider.ReasonTimeout, provider.ErrUnavailable
	}
	return provider.ReasonUnknown, provider.ErrUnavailable
}

// begun makes the error of a call that may have changed something say so.
func begun(err error) error {
	if _, ours := errors.AsType[*Fault](err); err == nil || ours || libvirt.Answered(err) {
		return err
	}
	f := judge(err)
	f.Kind = provider.ErrOutcomeUnknown
	return f
}
