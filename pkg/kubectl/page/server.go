// Package page serves the page of kubectl gpu web: the map of a cluster's GPUs, drawn in a
// browser of the same machine from what package feed knows.
package page

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"embed"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/tessera-dra/tessera/pkg/kubectl/feed"
)

//go:embed files
var files embed.FS

// Why answers why a pod waits: a value whose JSON has the fields text and change.
type Why func(ctx context.Context, namespace, pod string) (any, error)

// Server serves the page to whoever has the token of this run, on an address of this
// machine.
//
// Any program and any user of the machine can connect to the address, and any page in
// the user's browser can make requests to it. Therefore the first request has to bring
// the token, which only the address that was printed has. The answer is a cookie for a
// path that is as hard to guess: browsers send cookies to all ports of a host, but not
// to other paths. The Host header is checked, because a name of an attacker's could be
// made to mean this address.
type Server struct {
	source *feed.Source
	why    Why
	// hosts are the values of the Host header that name the address.
	hosts []string
	// token opens the page, cookie is the value that it is exchanged for, and path where
	// the page is.
	token, cookie, path string
	address             string
}

// NewServer makes a server of the page on a loopback address.
func NewServer(address net.Addr, source *feed.Source, why Why) (*Server, error) {
	at, ok := address.(*net.TCPAddr)
	if !ok || !at.IP.IsLoopback() {
		return nil, fmt.Errorf("%s isn't an address that only this machine can reach", address)
	}
	hosts := []string{at.String(), fmt.Sprintf("localhost:%d", at.Port)}
	if at.Port == 80 { // browsers leave out the default port
		hosts = append(hosts, strings.TrimSuffix(at.String(), ":80"), "localhost")
	}
	return &Server{
		source: source, why: why, address: at.String(), hosts: hosts,
		token: rand.Text(), cookie: rand.Text(), path: "/" + rand.Text() + "/",
	}, nil
}

// URL opens the page.
func (s *Server) URL() string {
	return (&url.URL{Scheme: "http", Host: s.address, Path: "/", RawQuery: url.Values{"token": {s.token}}.Encode()}).String()
}

// cookieName is the name of the cookie.
const cookieName = "kubectl-gpu"

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "+
		"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
	switch {
	case !slices.Contains(s.hosts, r.Host):
		http.Error(w, "403: this server answers only to its address "+s.address+".", http.StatusForbidden)
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
		h.Set("Allow", "GET, HEAD")
		http.Error(w, "405: this server only shows.", http.StatusMethodNotAllowed)
	case r.URL.Path == "/":
		s.enter(w, r)
	case strings.HasPrefix(r.URL.Path, s.path) && s.knows(r):
		s.serve(w, r, strings.TrimPrefix(r.URL.Path, s.path))
	default:
		refuse(w)
	}
}

func refuse(w http.ResponseWriter) {
	http.Error(w, "403: open the address that kubectl gpu web printed, with its token.", http.StatusForbidden)
}

// enter exchanges the token for the cookie, and the address for one without a token.
func (s *Server) enter(w http.ResponseWriter, r *http.Request) {
	if !equal(r.URL.Query().Get("token"), s.token) {
		refuse(w)
		return
	}
	http.SetCookie(w, &http.Cookie{ //nolint:gosec // no Secure: the page comes without TLS, from this machine
		Name: cookieName, Value: s.cookie, Path: s.path, HttpOnly: true, SameSite: http.SameSiteStrictMode,
	})
	http.Redirect(w, r, s.path, http.StatusSeeOther)
}

// knows reports whether the request has the cookie.
func (s *Server) knows(r *http.Request) bool {
	return slices.ContainsFunc(r.CookiesNamed(cookieName), func(c *http.Cookie) bool { return equal(c.Value, s.cookie) })
}

// equal takes as long for every wrong value of the right length.
func equal(got, want string) bool { return subtle.ConstantTimeCompare([]byte(got), []byte(want)) == 1 }

func (s *Server) serve(w http.ResponseWriter, r *http.Request, name string) {
	switch name {
	case "events":
		s.events(w, r)
	case "outline":
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(s.source.Outlines())
	case "why":
		s.answer(w, r)
	default:
		page, err := fs.Sub(files, "files")
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		http.StripPrefix(strings.TrimSuffix(s.path, "/"), http.FileServerFS(page)).ServeHTTP(w, r)
	}
}

// answer says why a pod waits.
func (s *Server) answer(w http.ResponseWriter, r *http.Request) {
	out, err := s.why(r.Context(), r.URL.Query().Get("namespace"), r.URL.Query().Get("pod"))
	if err != nil {
		out = map[string]string{"text": err.Error()}
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(feed.Encode(out))
}
