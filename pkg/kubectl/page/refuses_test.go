package page_test

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/tessera-dra/tessera/pkg/kubectl/feed/feedtest"
	"github.com/tessera-dra/tessera/pkg/kubectl/page"
)

// TestRefuses: only who has the token gets anything.
func TestRefuses(t *testing.T) {
	s := serve(t, feedtest.New())
	member := browser(t)
	home := get(t, member, s.URL()).Request.URL
	if home.RawQuery != "" {
		t.Errorf("the page's address %s has the token", home)
	}
	cookies := member.Jar.Cookies(home)
	for name, tc := range map[string]struct {
		method, path, host string
		cookie             bool
		want               int
	}{
		"page":          {path: home.Path, cookie: true, want: http.StatusOK},
		"localhost":     {path: home.Path, host: "localhost:" + home.Port(), cookie: true, want: http.StatusOK},
		"script":        {path: home.Path + "main.js", cookie: true, want: http.StatusOK},
		"why":           {path: home.Path + "why?namespace=a&pod=b", cookie: true, want: http.StatusOK},
		"no token":      {path: "/", want: http.StatusForbidden},
		"wrong token":   {path: "/?token=AAAAAAAAAAAAAAAAAAAAAAAAAA", want: http.StatusForbidden},
		"no cookie":     {path: home.Path, want: http.StatusForbidden},
		"events":        {path: home.Path + "events", want: http.StatusForbidden},
		"outline":       {path: home.Path + "outline", want: http.StatusForbidden},
		"wrong path":    {path: "/events", cookie: true, want: http.StatusForbidden},
		"another host":  {path: home.Path, host: "rebind.example.com:" + home.Port(), cookie: true, want: http.StatusForbidden},
		"no port":       {path: home.Path, host: "127.0.0.1", cookie: true, want: http.StatusForbidden},
		"token, host":   {path: strings.TrimPrefix(s.URL(), "http://"+home.Host), host: "rebind.example.com", want: http.StatusForbidden},
		"writes":        {method: http.MethodPost, path: home.Path, cookie: true, want: http.StatusMethodNotAllowed},
		"no such file":  {path: home.Path + "style.scss", cookie: true, want: http.StatusNotFound},
		"other's files": {path: home.Path + "../../etc/passwd", cookie: true, want: http.StatusNotFound},
	} {
		t.Run(name, func(t *testing.T) {
			r := httptest.NewRequestWithContext(t.Context(), tc.method, "http://"+home.Host+tc.path, http.NoBody)
			if tc.host != "" {
				r.Host = tc.host
			}
			if tc.cookie {
				for _, c := range cookies {
					r.AddCookie(c)
				}
			}
			w := httptest.NewRecorder()
			s.ServeHTTP(w, r)
			if w.Code != tc.want {
				body, _ := io.ReadAll(w.Body)
				t.Errorf("status %d, want %d: %s", w.Code, tc.want, body)
			}
			if policy := w.Header().Get("Content-Security-Policy"); !strings.Contains(policy, "default-src 'none'") {
				t.Errorf("Content-Security-Policy: %q", policy)
			}
		})
	}
	if _, err := page.NewServer(&net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 80}, nil, nil); err == nil {
		t.Error("an address that others can reach is taken")
	}
}

// TestDefaultPort: browsers leave port 80 out of the Host header.
func TestDefaultPort(t *testing.T) {
	s, err := page.NewServer(&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for host, want := range map[string]int{
		"127.0.0.1": http.StatusSeeOther, "localhost": http.StatusSeeOther, "127.0.0.1:80": http.StatusSeeOther, "rebind.example.com": http.StatusForbidden,
	} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, s.URL(), http.NoBody)
		r.Host = host
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		if w.Code != want {
			t.Errorf("Host %s: status %d, want %d", host, w.Code, want)
		}
	}
}
