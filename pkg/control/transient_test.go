package control

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"syscall"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// TestTransient: which failures a controller that starts waits for. After others it ends,
// and the kubelet starts it again after up to five minutes.
func TestTransient(t *testing.T) {
	request := func(err error) error {
		return &url.Error{Op: "Get", URL: "https://10.96.0.1/apis", Err: err}
	}
	dial := func(errno syscall.Errno) error {
		return request(&net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", errno)})
	}
	slices := schema.GroupResource{Group: "resource.k8s.io", Resource: "resourceslices"}
	for name, tc := range map[string]struct {
		err  error
		want bool
	}{
		"connection refused":        {dial(syscall.ECONNREFUSED), true},
		"connection reset":          {dial(syscall.ECONNRESET), true},
		"no route to host":          {dial(syscall.EHOSTUNREACH), true},
		"network is unreachable":    {dial(syscall.ENETUNREACH), true},
		"time is over":              {request(os.ErrDeadlineExceeded), true},
		"connection closed":         {request(io.EOF), true},
		"another authority":         {request(x509.UnknownAuthorityError{}), true},
		"expired certificate":       {request(x509.CertificateInvalidError{Reason: x509.Expired}), true},
		"token expired":             {apierrors.NewUnauthorized("token expired"), true},
		"the server starts":         {apierrors.NewServiceUnavailable("not yet"), true},
		"too many requests":         {apierrors.NewTooManyRequests("later", 1), true},
		"etcd is away":              {apierrors.NewInternalError(errors.New("etcdserver: request timed out")), true},
		"no rights":                 {apierrors.NewForbidden(slices, "", errors.New("no")), false},
		"a kind that isn't served":  {apierrors.NewNotFound(slices, ""), false},
		"an answer of another kind": {errors.New("no such version"), false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := isTransient(fmt.Errorf("ask the API server: %w", tc.err)); got != tc.want {
				t.Errorf("got %t, want %t", got, tc.want)
			}
		})
	}
}
