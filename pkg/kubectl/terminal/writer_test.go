package terminal

import (
	"strings"
	"testing"
)

// TestTerminal: a terminal with colours shows those of this program only.
func TestTerminal(t *testing.T) {
	for _, tc := range []struct {
		colour   bool
		in, want string
	}{
		{true, red + "bad" + plain + "\x1b[5m", red + "bad" + plain + "\ufffd[5m"},
		{false, red + "bad" + plain, "\ufffd[31mbad\ufffd[0m"},
		{true, "a\u00a0b\tc\n\u009b\x7f\xff", "a b\tc\n\ufffd\ufffd\ufffd"},
	} {
		var out strings.Builder
		n, err := Writer{&out, tc.colour}.Write([]byte(tc.in))
		if n != len(tc.in) || err != nil || out.String() != tc.want {
			t.Errorf("%q: %q (%d, %v), want %q", tc.in, out.String(), n, err, tc.want)
		}
	}
}
