package main

import (
	"io"
	"strings"
	"testing"
)

func TestRunRefusesArguments(t *testing.T) {
	err := run(t.Context(), []string{"everything"}, io.Discard)
	if err == nil || !strings.Contains(err.Error(), `unexpected argument "everything"`) {
		t.Errorf("error %v", err)
	}
}
