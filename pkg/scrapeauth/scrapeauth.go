// Package scrapeauth lets only those read a program's metrics whom the API server lets
// get the path: with a bearer token, and a role for the non-resource URL.
package scrapeauth

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/tessera-dra/tessera/pkg/endpoints"
)

const (
	// allowedFor is how long a token may be used after the API server allowed it: it is
	// not asked at each scrape.
	allowedFor = time.Minute
	// knownFor is how long a token, and the address that it came from, are preferred to
	// strangers after the API server allowed the token.
	knownFor = time.Hour
	// maxKnown limits how many callers are known.
	maxKnown = 10_000
	// answerWithin is how long the API server may take.
	answerWithin = 5 * time.Second
	// asksPerSecond and asksAtOnce limit how often the API server is asked for all
	// strangers together, and for each token and address that is known.
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

// guard remembers which tokens were allowed which path, and where they came from.
type guard struct {
	kube      kubernetes.Interface
	next      http.Handler
	clock     clock.PassiveClock
	strangers flowcontrol.RateLimiter

	// known has callers that were allowed: tokens with a path, and their addresses. They
	// have a rate limit of their own, so that unknown tokens from elsewhere can't keep out
	// a caller whose token was renewed. Unknown tokens from the caller's own address (same
	// NAT or proxy) can: then a renewed token gets 429 until one of its requests finds
	// room, while the old token works until it expires. Counting only failures wouldn't
	// help, because only the API server knows whether a token is valid.
	known *cache.LRUExpireCache // caller → acquaintance
}

// caller is the digest of a token with a path, or of an address.
type caller [sha256.Size]byte

func tokenFor(path, token string) caller { return sha256.Sum256([]byte(path + "\x00" + token)) }

func address(r *http.Request) caller {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		host = r.RemoteAddr
	}
	return sha256.Sum256([]byte(host))
}

type acquaintance struct {
	allowed time.Time // the last time
	asks    flowcontrol.RateLimiter
}

// Handler passes on requests of users that may get the request's path. kube needs the
// right to create TokenReviews and SubjectAccessReviews. The API server is asked about a
// token at most once a minute.
func Handler(kube kubernetes.Interface, next http.Handler) http.Handler {
	return newGuard(kube, next, clock.RealClock{})
}

func newGuard(kube kubernetes.Interface, next http.Handler, c clock.PassiveClock) *guard {
	return &guard{
		kube: kube, next: next, clock: c, known: cache.NewLRUExpireCacheWithClock(maxKnown, c),
		strangers: newLimiter(),
	}
}

func newLimiter() flowcontrol.RateLimiter {
	return flowcontrol.NewTokenBucketRateLimiter(asksPerSecond, asksAtOnce)
}

// Guard has a server speak TLS, and pass on requests as Handler does. The certificate is
// self-signed and made for this process: it protects tokens from being read on the way, but
// doesn't authenticate the server.
func Guard(kube kubernetes.Interface, s endpoints.Server) (endpoints.Server, error) {
	certificate, key, err := cert.GenerateSelfSignedCertKey("localhost", nil, nil)
	if err != nil {
		return s, fmt.Errorf("make a certificate for metrics: %w", err)
	}
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return s, fmt.Errorf("use the certificate for metrics: %w", err)
	}
	s.TLS = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}
	s.Handler = Handler(kube, s.Handler)
	return s, nil
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
	key, from := tokenFor(r.URL.Path, token), address(r)
	allowed, asks := g.look(key, from)
	if allowed {
		return nil
	}
	if !asks.TryAccept() {
		return errTooMany
	}
	ctx, cancel := context.WithTimeout(r.Context(), answerWithin)
	defer cancel()
	err := g.ask(ctx, token, r.URL.Path)
	g.learn(err, key, from)
	return err
}

// look reports whether the token was allowed lately, and otherwise what limits asking
// the API server about it.
func (g *guard) look(key, from caller) (allowed bool, asks flowcontrol.RateLimiter) {
	if a, found := g.known.Get(key); found {
		a := a.(acquaintance)
		return g.clock.Since(a.allowed) < allowedFor, a.asks
	}
	if a, found := g.known.Get(from); found {
		return false, a.(acquaintance).asks
	}
	return false, g.strangers
}

// learn remembers a token that is allowed, and forgets one that is refused. An address
// that was allowed stays known: others may share it.
func (g *guard) learn(err error, key, from caller) {
	var forbidden forbiddenError
	if errors.Is(err, errUnauthenticated) || errors.As(err, &forbidden) {
		g.known.Remove(key)
	}
	if err != nil {
		return
	}
	for _, c := range []caller{key, from} {
		a := acquaintance{allowed: g.clock.Now(), asks: newLimiter()}
		if before, found := g.known.Get(c); found {
			a.asks = before.(acquaintance).asks
		}
		g.known.Add(c, a, knownFor)
	}
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
