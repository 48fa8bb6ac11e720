package scrapeauth

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/tessera-dra/tessera/pkg/endpoints"
)

// server is an API server that knows the tokens "good" and "renewed" until it doesn't, and counts how
// often it is asked whose a token is. (TestMetricsAuthentication asks a real one.)
type server struct {
	*fake.Clientset
	good  bool
	down  bool
	asked int
}

func newServer() *server {
	s := &server{Clientset: fake.NewClientset(), good: true}
	s.PrependReactor("create", "tokenreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		s.asked++
		if s.down {
			return true, nil, errors.New("down")
		}
		review := a.(clienttesting.CreateAction).GetObject().(*authenticationv1.TokenReview)
		review.Status.Authenticated = s.good && (review.Spec.Token == "good" || review.Spec.Token == "renewed")
		return true, review, nil
	})
	s.PrependReactor("create", "subjectaccessreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		review := a.(clienttesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview)
		review.Status.Allowed = review.Spec.NonResourceAttributes.Path == "/metrics" && review.Spec.NonResourceAttributes.Verb == "get"
		return true, review, nil
	})
	return s
}

func status(h http.Handler, path, authorization string) int {
	return statusFrom(h, "10.0.0.1:4711", path, authorization)
}

func statusFrom(h http.Handler, from, path, authorization string) int {
	request := httptest.NewRequest(http.MethodGet, path, http.NoBody)
	request.RemoteAddr = from
	request.Header.Set("Authorization", authorization)
	answer := httptest.NewRecorder()
	h.ServeHTTP(answer, request)
	return answer.Code
}

// TestGuard checks that a guarded server speaks TLS only, and asks for a token.
func TestGuard(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	server, err := Guard(newServer(), endpoints.Metrics(address, endpoints.NewRegistry()))
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan error, 1)
	err = endpoints.Serve(t.Context(), func(ctx context.Context) error {
		asked <- askGuarded(ctx, address)
		return nil
	}, server)
	if err := errors.Join(err, <-asked); err != nil {
		t.Error(err)
	}
}

// askGuarded reads metrics with and without a token, once the server listens.
func askGuarded(ctx context.Context, address string) error {
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	defer client.CloseIdleConnections()
	for token, want := range map[string]int{"Bearer good": http.StatusOK, "Bearer bad": http.StatusUnauthorized, "": http.StatusUnauthorized} {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+address+"/metrics", http.NoBody)
		if err != nil {
			return err
		}
		request.Header.Set("Authorization", token)
		answer, err := client.Do(request)
		for err != nil && ctx.Err() == nil { // until it listens
			<-time.After(10 * time.Millisecond)
			answer, err = client.Do(request)
		}
		if err != nil {
			return err
		}
		answer.Body.Close()
		if answer.StatusCode != want {
			return fmt.Errorf("with the token %q: %s, want %d", token, answer.Status, want)
		}
	}
	plain, err := http.Get("http://" + address + "/metrics")
	if err != nil {
		return err
	}
	plain.Body.Close()
	if plain.StatusCode != http.StatusBadRequest {
		return fmt.Errorf("without TLS: %s", plain.Status)
	}
	return nil
}

func TestStatus(t *testing.T) {
	for name, c := range map[string]struct {
		path, authorization string
		down                bool
		want                int
	}{
		"allowed":           {path: "/metrics", authorization: "Bearer good", want: http.StatusOK},
		"no token":          {path: "/metrics", want: http.StatusUnauthorized},
		"an empty token":    {path: "/metrics", authorization: "Bearer ", want: http.StatusUnauthorized},
		"a password":        {path: "/metrics", authorization: "Basic good", want: http.StatusUnauthorized},
		"a stranger":        {path: "/metrics", authorization: "Bearer bad", want: http.StatusUnauthorized},
		"another path":      {path: "/other", authorization: "Bearer good", want: http.StatusForbidden},
		"the server's away": {path: "/metrics", authorization: "Bearer good", down: true, want: http.StatusServiceUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer()
			s.down = c.down
			if got := status(Handler(s, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})), c.path, c.authorization); got != c.want {
				t.Errorf("status %d, want %d", got, c.want)
			}
		})
	}
}

// TestRemembered checks that a revoked token is refused a minute later. Until then the API
// server isn't asked about it again, for this path only.
func TestRemembered(t *testing.T) {
	s, now := newServer(), clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	h := newGuard(s, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), now)
	check := func(path string, want, asked int) {
		t.Helper()
		if got := status(h, path, "Bearer good"); got != want || s.asked != asked {
			t.Errorf("status %d, asked %d times, want %d and %d", got, s.asked, want, asked)
		}
	}
	check("/metrics", http.StatusOK, 1)
	s.good = false
	now.SetTime(time.Unix(59, 0))
	check("/metrics", http.StatusOK, 1)
	check("/other", http.StatusUnauthorized, 2)
	now.SetTime(time.Unix(60, 0))
	check("/metrics", http.StatusUnauthorized, 3)
}

// TestManyStrangers checks that requests with unknown tokens cause only a limited number of
// reviews by the API server, and don't keep out a caller that was allowed: neither when the
// answer about its token is too old, nor when it has a new token.
func TestManyStrangers(t *testing.T) {
	const prometheus, strangers = "10.0.0.1:4711", "10.0.0.2:4711"
	for name, c := range map[string]struct{ from, token string }{
		"the same token":                   {from: prometheus, token: "good"},
		"the same token by another way":    {from: strangers, token: "good"},
		"another token of the same caller": {from: prometheus, token: "renewed"},
	} {
		t.Run(name, func(t *testing.T) {
			s, now := newServer(), clocktesting.NewFakePassiveClock(time.Unix(0, 0))
			h := newGuard(s, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), now)
			if got := statusFrom(h, prometheus, "/metrics", "Bearer good"); got != http.StatusOK {
				t.Fatalf("status %d", got)
			}
			flood(t, h, strangers, "bad")
			if got := statusFrom(h, prometheus, "/metrics", "Bearer good"); got != http.StatusOK {
				t.Errorf("at once: status %d", got)
			}
			now.SetTime(time.Unix(0, 0).Add(allowedFor))
			if got := statusFrom(h, c.from, "/metrics", "Bearer "+c.token); got != http.StatusOK {
				t.Errorf("after %s: status %d", allowedFor, got)
			}
		})
	}
}

// TestRevoked checks that a caller that isn't allowed any more counts as unknown, and doesn't
// keep others out.
func TestRevoked(t *testing.T) {
	s, now := newServer(), clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	h := newGuard(s, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), now)
	for from, token := range map[string]string{"10.0.0.1:1": "good", "10.0.0.2:1": "renewed"} {
		if got := statusFrom(h, from, "/metrics", "Bearer "+token); got != http.StatusOK {
			t.Fatalf("status %d", got)
		}
	}
	now.SetTime(time.Unix(0, 0).Add(allowedFor))
	s.good = false
	flood(t, h, "10.0.0.1:1", "good")
	s.good = true
	if got := statusFrom(h, "10.0.0.2:1", "/metrics", "Bearer renewed"); got != http.StatusOK {
		t.Errorf("status %d", got)
	}
}

// flood asks with a token until it is refused for being one of too many.
func flood(t *testing.T, h http.Handler, from, token string) {
	t.Helper()
	for range 1000 {
		if statusFrom(h, from, "/metrics", "Bearer "+token) == http.StatusTooManyRequests {
			return
		}
	}
	t.Error("the API server was asked about every one of 1000 tokens")
}
