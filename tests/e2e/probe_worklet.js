// The loudness of each 20 ms, and where a sound begins after silence, on the graph's own clock.
const AUDIBLE = 0.02;
const SILENCE_FRAMES = 0.2 * sampleRate;
const PIECE_FRAMES = 0.02 * sampleRate;

class Meter extends AudioWorkletProcessor {
  #sum = 0;
  #count = 0;
  #quiet = 0;

  process([[samples]]) {
    for (let i = 0; samples && i < samples.length; i++) {
      if (Math.abs(samples[i]) < AUDIBLE) {
        this.#quiet++;
      } else {
        const begins = this.#quiet > SILENCE_FRAMES;
        if (begins) this.port.postMessage({ contextS: (currentFrame + i) / sampleRate });
        this.#quiet = 0;
      }
      this.#sum += samples[i] * samples[i];
      if (++this.#count === PIECE_FRAMES) {
        const contextS = (currentFrame + i) / sampleRate;
        this.port.postMessage({ contextS, rms: Math.sqrt(this.#sum / PIECE_FRAMES) });
        this.#sum = this.#count = 0;
      }
    }
    return true;
  }
}
registerProcessor("probe-meter", Meter);
