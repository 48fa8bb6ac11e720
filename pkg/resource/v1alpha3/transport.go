package v1alpha3

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"
)

const (
	group = "resource.k8s.io/"
	alpha = group + "v1alpha3"
	beta  = group + "v1beta1"
)

// Transport returns a RoundTripper that repeats a request for
// resource.k8s.io/v1beta1 as one for v1alpha3 if the server doesn't serve v1beta1.
// It passes all other requests to next. It is for rest.Config.Wrap.
//
// It remembers nothing, because the server may be upgraded: on Kubernetes 1.31 each
// request costs another one that the server answers with 404.
func Transport(next http.RoundTripper) http.RoundTripper { return &transport{next: next} }

type transport struct {
	next http.RoundTripper
	said sync.Once
}

// RoundTrip implements http.RoundTripper.
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	before, after, found := strings.Cut(req.URL.Path, "/apis/"+beta)
	if !found || after != "" && after[0] != '/' {
		return t.next.RoundTrip(req)
	}
	body, err := readBody(req)
	if err != nil {
		return nil, err
	}
	resp, served, err := t.send(withBody(req, body))
	if err != nil || served {
		return resp, err
	}
	older, err := translateRequest(req, before+"/apis/"+alpha+after, body)
	if err != nil {
		return nil, err
	}
	if resp, served, err = t.send(older); err != nil || !served {
		return resp, err
	}
	t.said.Do(func() {
		klog.FromContext(req.Context()).Info("The API server doesn't serve " + beta + ": translating to " + alpha)
	})
	return translateResponse(resp), nil
}

// send also reports whether the server has the group, version and resource of a
// request. If not, the body of the response needs no closing.
func (t *transport) send(req *http.Request) (resp *http.Response, served bool, err error) {
	resp, err = t.next.RoundTrip(req)
	if err != nil || resp.StatusCode != http.StatusNotFound {
		return resp, true, err
	}
	body, err := io.ReadAll(resp.Body)
	if err := closeBody(resp.Body, err); err != nil {
		return nil, false, fmt.Errorf("read the answer to %s %s: %w", req.Method, req.URL.Path, err)
	}
	resp.Body = io.NopCloser(bytes.NewReader(body))
	return resp, namesObject(body), nil
}

// namesObject reports whether the answer "not found", in JSON or protobuf, is about an
// object.
func namesObject(body []byte) bool {
	answer, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
	status, ok := answer.(*metav1.Status)
	return err == nil && ok && status.Details != nil && status.Details.Name != ""
}

func isJSON(h http.Header) bool {
	kind, _, err := mime.ParseMediaType(h.Get("Content-Type"))
	return err == nil && kind == runtime.ContentTypeJSON
}

func readBody(req *http.Request) ([]byte, error) {
	if req.Body == nil {
		return nil, nil
	}
	body, err := io.ReadAll(req.Body)
	if err := closeBody(req.Body, err); err != nil {
		return nil, fmt.Errorf("read the body of %s %s: %w", req.Method, req.URL.Path, err)
	}
	return body, nil
}

func closeBody(body io.Closer, err error) error {
	if closeErr := body.Close(); err == nil {
		return closeErr
	}
	return err
}

func withBody(req *http.Request, body []byte) *http.Request {
	req = req.Clone(req.Context())
	if body == nil {
		return req
	}
	req.Body, req.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
	return req
}

// translateRequest returns a request for v1alpha3 that asks for JSON.
func translateRequest(req *http.Request, path string, body []byte) (*http.Request, error) {
	protobuf := req.Header.Get("Content-Type") == runtime.ContentTypeProtobuf
	if len(body) > 0 {
		object, err := decode(body, protobuf)
		if err != nil {
			return nil, fmt.Errorf("translate the body of %s %s to %s: %w", req.Method, req.URL.Path, alpha, err)
		}
		toAlpha.object(object)
		if body, err = json.Marshal(object); err != nil {
			return nil, err
		}
	}
	req = withBody(req, body)
	req.URL.Path, req.URL.RawPath = path, ""
	req.Header.Set("Accept", runtime.ContentTypeJSON)
	if protobuf {
		req.Header.Set("Content-Type", runtime.ContentTypeJSON)
	}
	return req, nil
}

func decode(body []byte, protobuf bool) (object map[string]any, err error) {
	if protobuf {
		typed, kind, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
		if err != nil {
			return nil, err
		}
		typed.GetObjectKind().SetGroupVersionKind(*kind)
		if body, err = json.Marshal(typed); err != nil {
			return nil, err
		}
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	return object, d.Decode(&object)
}

func translateResponse(resp *http.Response) *http.Response {
	if !isJSON(resp.Header) {
		return resp
	}
	d := json.NewDecoder(resp.Body)
	d.UseNumber()
	resp.Body = &translated{source: resp.Body, objects: d}
	resp.ContentLength = -1
	resp.Header.Del("Content-Length")
	return resp
}

// translated is a response as v1beta1: one object, or those of a watch as they come.
type translated struct {
	source  io.Closer
	objects *json.Decoder
	pending bytes.Buffer
}

// Read implements io.Reader.
func (b *translated) Read(p []byte) (int, error) {
	for b.pending.Len() == 0 {
		var object map[string]any
		if err := b.objects.Decode(&object); err != nil {
			return 0, err
		}
		toBeta.object(object)
		if err := json.NewEncoder(&b.pending).Encode(object); err != nil {
			return 0, err
		}
	}
	return b.pending.Read(p)
}

// Close implements io.Closer.
func (b *translated) Close() error { return b.source.Close() }
