package scrapeauth

import (
	"errors"
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
)

// server is an API server that knows the token "good" until it doesn't, and counts how
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
		review.Status.Authenticated = s.good && review.Spec.Token == "good"
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
	request := httptest.NewRequest(http.MethodGet, path, http.NoBody)
	request.Header.Set("Authorization", authorization)
	answer := httptest.NewRecorder()
	h.ServeHTTP(answer, request)
	return answer.Code
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

// A token that was revoked is refused a minute later; until then nobody is asked, for
// this path only.
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

// Strangers can't have the API server asked without end, and don't keep those out who
// were allowed.
func TestManyStrangers(t *testing.T) {
	s := newServer()
	h := Handler(s, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	if got := status(h, "/metrics", "Bearer good"); got != http.StatusOK {
		t.Fatalf("status %d", got)
	}
	limited := 0
	for range 1000 {
		if status(h, "/metrics", "Bearer bad") == http.StatusTooManyRequests {
			limited++
		}
	}
	if limited == 0 {
		t.Error("the API server was asked about every one of 1000 tokens")
	}
	if got := status(h, "/metrics", "Bearer good"); got != http.StatusOK {
		t.Errorf("who was allowed before: status %d", got)
	}
}
