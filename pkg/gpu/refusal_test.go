package gpu

import (
	"errors"
	"fmt"
	"testing"
)

func TestRefusedError(t *testing.T) {
	reason := errors.New("Unknown Error")
	err := fmt.Errorf("prepare: %w", &RefusedError{Silicon: []Device{Whole{GPU: "a"}}, Action: "be used whole", Err: reason})
	if got := err.Error(); got != "prepare: Unknown Error" || !errors.Is(err, reason) {
		t.Errorf("got %q, want the reason only", got)
	}
}
