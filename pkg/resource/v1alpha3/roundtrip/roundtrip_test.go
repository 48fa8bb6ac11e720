// Package roundtrip checks the translation with the types of Kubernetes 1.31
// itself. It is a module of its own, because a module has one version of
// k8s.io/api.
package roundtrip

import (
	"bytes"
	"encoding/json"
	"io"
	"math/rand"
	"net/http"
	"testing"

	resourcev1beta1 "k8s.io/api/resource/v1beta1"
	resourcev1alpha3 "k8s.io/api131/resource/v1alpha3"
	"k8s.io/apimachinery/pkg/api/apitesting/fuzzer"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metafuzzer "k8s.io/apimachinery/pkg/apis/meta/fuzzer"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/diff"
	"sigs.k8s.io/randfill"

	"github.com/tessera-dra/tessera/pkg/resource/v1alpha3"
)

const objects = 3000

// TestRoundTrip reads random objects of the server as v1beta1 and writes them back:
// both have to be free of fields that their version doesn't have, and the server has
// to store what it had.
func TestRoundTrip(t *testing.T) {
	t.Run("ResourceSlice", func(t *testing.T) {
		roundTrip[resourcev1alpha3.ResourceSlice, resourcev1beta1.ResourceSlice](t, func(s *resourcev1alpha3.ResourceSlice) { s.TypeMeta = is("ResourceSlice") })
	})
	t.Run("ResourceClaim", func(t *testing.T) {
		roundTrip[resourcev1alpha3.ResourceClaim, resourcev1beta1.ResourceClaim](t, func(c *resourcev1alpha3.ResourceClaim) {
			c.TypeMeta = is("ResourceClaim")
			c.Spec.Controller, c.Status.DeallocationRequested = "", false
			if c.Status.Allocation != nil {
				c.Status.Allocation.Controller = ""
			}
		})
	})
	t.Run("DeviceClass", func(t *testing.T) {
		roundTrip[resourcev1alpha3.DeviceClass, resourcev1beta1.DeviceClass](t, func(c *resourcev1alpha3.DeviceClass) { c.TypeMeta, c.Spec.SuitableNodes = is("DeviceClass"), nil })
	})
}

func is(kind string) metav1.TypeMeta {
	return metav1.TypeMeta{Kind: kind, APIVersion: resourcev1alpha3.SchemeGroupVersion.String()}
}

// roundTrip checks objects of type A; complete sets their kind, and removes what
// v1beta1 doesn't have.
func roundTrip[A, B any](t *testing.T, complete func(*A)) {
	random := fuzzer.FuzzerFor(fuzzer.MergeFuzzerFuncs(metafuzzer.Funcs, values), rand.NewSource(1), serializer.NewCodecFactory(runtime.NewScheme()))
	s := &server[A]{}
	client := v1alpha3.Transport(s)
	for range objects {
		var want A
		random.Fill(&want)
		complete(&want)
		s.has = want
		read := new(B)
		strict(t, send(t, client, nil), read)
		written, err := json.Marshal(read)
		if err != nil {
			t.Fatal(err)
		}
		send(t, client, written)
		if s.err != nil {
			t.Fatalf("stored %s: %v", written, s.err)
		}
		if !equality.Semantic.DeepEqual(&want, &s.has) {
			t.Fatalf("stored (-want +got):\n%s", diff.Diff(&want, &s.has))
		}
	}
}

// values fills what has to be of a form to survive JSON.
func values(serializer.CodecFactory) []any {
	return []any{
		func(q *resource.Quantity, c randfill.Continue) {
			*q = *resource.NewQuantity(c.Int63n(1<<40), resource.BinarySI)
			_ = q.String() // is cached in it
		},
		func(e *runtime.RawExtension, _ randfill.Continue) { e.Raw = []byte(`{"kind":"GpuConfig"}`) },
	}
}

// server has one object and no v1beta1.
type server[A any] struct {
	has A
	err error
}

// RoundTrip stores the object that is sent, if any, and answers with it.
func (s *server[A]) RoundTrip(r *http.Request) (*http.Response, error) {
	header := http.Header{"Content-Type": {runtime.ContentTypeJSON}}
	if r.URL.Path != "/apis/resource.k8s.io/v1alpha3/x" {
		body := io.NopCloser(bytes.NewReader([]byte(`{"kind":"Status","details":{}}`)))
		return &http.Response{StatusCode: http.StatusNotFound, Header: header, Body: body}, nil
	}
	if r.Body != nil {
		s.has = *new(A)
		d := json.NewDecoder(r.Body)
		d.DisallowUnknownFields()
		s.err = d.Decode(&s.has)
	}
	data, err := json.Marshal(s.has)
	return &http.Response{StatusCode: http.StatusOK, Header: header, Body: io.NopCloser(bytes.NewReader(data))}, err
}

func send(t *testing.T, client http.RoundTripper, body []byte) io.Reader {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "http://server/apis/resource.k8s.io/v1beta1/x", nil)
	if err != nil {
		t.Fatal(err)
	}
	if body != nil {
		r.Body = io.NopCloser(bytes.NewReader(body))
	}
	resp, err := client.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	return resp.Body
}

func strict(t *testing.T, from io.Reader, into any) {
	t.Helper()
	d := json.NewDecoder(from)
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		t.Fatal(err)
	}
}
