// Package scrapeauth lets only those read a program's metrics whom the API server lets
// get the path: with a bearer token, and a role for the non-resource URL.
package scrapeauth

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

const (
	// allowedFor is how long a token may be used after the API server allowed it: it is
	// not asked at each scrape.
	allowedFor = time.Minute
	// answerWithin is how long the API server may take.
	answerWithin = 5 * time.Second
	// asksPerSecond and asksAtOnce keep strangers from having the API server asked as
	// often as they like.
	asksPerSecond = 2
	asksAtOnce    = 10
)

var (
	errUnauthenticated = errors.New("send a bearer token of this cluster")
	errTooMany         = errors.New("too many tokens to ask the API server about: try again in a second")
)

// forbiddenError names the user and the path.
type forbiddenError struct{ user, path string }

func (e forbiddenError) Error() string {
	return fmt.Sprintf("user %q may not get the path %s: bind a ClusterRole with nonResourceURLs [%s] and verbs [get]", e.user, e.path, e.path)
}

// guard remembers which tokens were allowed which path.
type guard struct {
	kube  kubernetes.Interface
	next  http.Handler
	clock clock.PassiveClock
	asks  flowcontrol.RateLimiter

	mu      sync.Mutex
	allowed map[[sha256.Size]byte]time.Time // until when
}

// Handler passes on requests of users that may get the request's path. kube needs the
// right to create TokenReviews and SubjectAccessReviews. The API server is asked about a
// token at most once a minute.
func Handler(kube kubernetes.Interface, next http.Handler) http.Handler {
	return newGuard(kube, next, clock.RealClock{})
}

func newGuard(kube kubernetes.Interface, next http.Handler, c clock.PassiveClock) *guard {
	return &guard{
		kube: kube, next: next, clock: c, allowed: map[[sha256.Size]byte]time.Time{},
		asks: flowcontrol.NewTokenBucketRateLimiter(asksPerSecond, asksAtOnce),
	}
}

// TLSConfig has a certificate that is made for this process and signed by itself: it
// keeps tokens from those who listen, and proves nothing about the server.
func TLSConfig() (*tls.Config, error) {
	certificate, key, err := cert.GenerateSelfSignedCertKey("localhost", nil, nil)
	if err != nil {
		return nil, fmt.Errorf("make a certificate for metrics: %w", err)
	}
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return nil, fmt.Errorf("use the certificate for metrics: %w", err)
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}, nil
}

// ServeHTTP implements http.Handler.
func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	err := g.check(r)
	var forbidden forbiddenError
	switch {
	case err == nil:
		g.next.ServeHTTP(w, r)
	case errors.Is(err, errUnauthenticated):
		w.Header().Set("WWW-Authenticate", "Bearer")
		http.Error(w, err.Error(), http.StatusUnauthorized)
	case errors.As(err, &forbidden):
		http.Error(w, err.Error(), http.StatusForbidden)
	case errors.Is(err, errTooMany):
		http.Error(w, err.Error(), http.StatusTooManyRequests)
	default:
		klog.FromContext(r.Context()).Error(err, "Can't tell who may read metrics")
		http.Error(w, "the API server doesn't say who may read metrics: see the program's log", http.StatusServiceUnavailable)
	}
}

// check returns nil if the request may pass.
func (g *guard) check(r *http.Request) error {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	token = strings.TrimSpace(token)
	if !strings.EqualFold(scheme, "bearer") || token == "" {
		return errUnauthenticated
	}
	key := sha256.Sum256([]byte(r.URL.Path + "\x00" + token))
	if g.remembered(key) {
		return nil
	}
	if !g.asks.TryAccept() {
		return errTooMany
	}
	ctx, cancel := context.WithTimeout(r.Context(), answerWithin)
	defer cancel()
	if err := g.ask(ctx, token, r.URL.Path); err != nil {
		return err
	}
	g.remember(key)
	return nil
}

func (g *guard) remembered(key [sha256.Size]byte) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	until, found := g.allowed[key]
	return found && g.clock.Now().Before(until)
}

// remember also forgets what is too old.
func (g *guard) remember(key [sha256.Size]byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.clock.Now()
	maps.DeleteFunc(g.allowed, func(_ [sha256.Size]byte, until time.Time) bool { return !now.Before(until) })
	g.allowed[key] = now.Add(allowedFor)
}

// ask asks the API server whose token it is, and whether that user may get the path.
func (g *guard) ask(ctx context.Context, token, path string) error {
	review, err := g.kube.AuthenticationV1().TokenReviews().Create(ctx,
		&authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create a TokenReview: %w", err)
	}
	if !review.Status.Authenticated {
		return errUnauthenticated
	}
	user := review.Status.User
	extra := make(map[string]authorizationv1.ExtraValue, len(user.Extra))
	for name, values := range user.Extra {
		extra[name] = authorizationv1.ExtraValue(values)
	}
	access, err := g.kube.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
		NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: path, Verb: "get"},
	}}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create a SubjectAccessReview: %w", err)
	}
	if !access.Status.Allowed {
		return forbiddenError{user: user.Username, path: path}
	}
	return nil
}
