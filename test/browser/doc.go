// Package browser tests the page of `kubectl gpu web` in Chromium: the document that the
// browser draws is compared with the model. run.sh runs it.
package browser
