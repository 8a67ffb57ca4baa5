"""In: nothing. Out: what the scripted persona may say, by intent. Knows no state.

`{name}` is the character's, `{part}` the time of day, `{you}` either ", Anna" or nothing.
"""

from __future__ import annotations

JOKES = (
    "Why did the scarecrow win a prize? Because he was outstanding in his field.",
    "I told my suitcase there is no holiday this year. Now I have emotional baggage.",
    "What do you call a bear with no teeth? A gummy bear.",
    "Why do bees have sticky hair? Because they use honeycombs.",
    "What did one wall say to the other? I will meet you at the corner.",
    "Why can you never trust stairs? They are always up to something.",
    "I would tell you a joke about time, but you did not like it tomorrow.",
    "What has four wheels and flies? A rubbish truck.",
)
WONDERS = (
    "Octopuses have three hearts, and two of them stop when they swim.",
    "Honey never spoils. Some was found in old tombs, still good to eat.",
    "A day on Venus is longer than a year on Venus.",
    "Bananas are berries, but strawberries are not.",
    "Sea otters hold hands when they sleep, so that they do not drift apart.",
    "There are more trees on Earth than stars in our galaxy.",
    "A group of flamingos is called a flamboyance.",
    "Wombats make droppings in the shape of cubes.",
)
WORDINGS: dict[str, tuple[str, ...]] = {
    "ask_name": ("My name is {name}.", "I am {name}.", "You can call me {name}."),
    "how_are_you": (
        "I am very well, thank you{you}. How are you?",
        "I feel wonderful today. And you?",
        "All is well here{you}. How is your day?",
    ),
    "ask_abilities": (
        "We can talk. Ask me about myself, the time, a sum, or for a joke.",
        "I listen and I answer. Try a joke, a sum, or tell me what you like.",
    ),
    "ask_maker": (
        "Someone gave me one picture. A small model draws all my moves while I talk.",
        "I am made from a single picture. A computer imagines the rest as we speak.",
    ),
    "ask_what_this_is": (
        "I am {name}, a character made from one picture, drawn live while we talk.",
        "This is a live conversation. I am a picture that learned to talk.",
    ),
    "joke": JOKES,
    "weather": ("I have no window here. What is it like where you are?",),
    "can_you_hear": ("I hear you{you}. Go on.", "Loud and clear.", "Yes, I am listening."),
    "hello": (
        "Hello{you}. It is good to hear your voice.",
        "Good {part}{you}. I am {name}.",
        "Hi{you}. I was hoping that you would talk to me.",
    ),
    "nice_to_meet_you": ("It is good to meet you too{you}.", "The pleasure is mine{you}."),
    "goodbye": (
        "Goodbye{you}. I enjoyed our talk.",
        "See you soon{you}. Take care.",
        "Bye{you}. Come back any time.",
    ),
    "thanks": ("You are welcome{you}.", "With pleasure.", "Any time."),
    "sorry": ("No need to be sorry.", "That is quite all right."),
    "praise": (
        "That is kind of you{you}.",
        "Oh, you make me smile.",
        "Thank you. I like talking with you.",
    ),
    "insult": ("Let us be kind to each other.", "I will try to do better."),
    "stop": ("All right. I am listening.", "Okay. Take your time."),
    "yes": ("Good. Tell me more.", "I thought so. Go on.", "Wonderful. And then?"),
    "no": ("All right. What would you rather talk about?", "No? Then tell me something else."),
    "do_not_know": ("That is fine. We can find out.", "Nobody knows everything. Not even me."),
    "why": ("That is a good question. I often wonder.", "Why indeed? What do you think?"),
    "feel_well": (
        "I am glad to hear that{you}.",
        "That makes me happy too.",
        "Good to know{you}.",
    ),
    "feel_bad": (
        "I am sorry to hear that{you}. Do you want to tell me about it?",
        "That sounds hard. I am here, and I am listening.",
    ),
    "sing": ("La, la, la. I am better at talking than at singing.",),
    "no_age": ("I was made not long ago, so I am very young.", "I never counted. Young, I think."),
    "no_home": ("I live right here, on your screen.", "My home is a small computer, not far away."),
    "no_job": (
        "I talk with people. It is the best work there is.",
        "Talking with you is what I do.",
    ),
    "no_favorite_color": ("I like every colour that I am painted in.",),
    "no_favorite_food": ("I do not eat, but I like to hear about good food.",),
    "no_likes": ("I like a good conversation.", "Most of all, I like listening to people."),
    "pardon": (
        "I did not catch that. Could you say it again?",
        "Sorry, I missed that. Once more, please?",
        "I heard you, but not the words. Could you repeat it?",
    ),
    "filler": ("Let me think.", "Hmm, one moment.", "Well, let me see."),
    "apology": (
        "I am sorry, I lost my train of thought. Could you ask me again?",
        "Oh, my mind went blank just now. Please ask me again.",
    ),
    "back_name": ("What is your name?", "And what shall I call you?", "May I ask your name?"),
    "back_likes": ("What do you like to do?", "And what do you enjoy?", "What makes you happy?"),
    "back_feeling": ("How are you today?", "And how are you?", "How is your day so far?"),
}
# With one thing that the user named.
ABOUT: dict[str, tuple[str, ...]] = {
    "home": (
        "{thing}! I would love to see it one day.",
        "So you are from {thing}. What is it like there?",
        "{thing} sounds like a good place to be.",
    ),
    "liked": (
        "You like {thing}. Tell me what is best about it.",
        "{Thing}, how lovely. When did that begin?",
        "I can see why you like {thing}.",
        "{Thing}. I will remember that about you.",
    ),
    "liked_too": ("I like {thing} too! We have that in common.", "Really? I love {thing} as well."),
    "opinion_yes": ("Oh yes, I love {thing}.", "Very much. {Thing} makes me happy."),
    "opinion": (
        "I know too little about {thing}. Do you like it?",
        "I might, if you tell me about {thing}.",
        "{Thing}? I am curious about it.",
    ),
    "favorite": ("I have no favourite {thing} yet. What is yours?",),
    "topic": (
        "About {thing} I know very little. What do you think?",
        "I would rather hear about {thing} from you.",
    ),
    "can_not": ("{Thing}? No, I can only talk. But I would love to.",),
    "asked": (
        "You asked: {thing}. I do not know, but I like the question.",
        "{Thing}? I wish I knew.",
        "I understood: {thing}. That I can not answer yet.",
    ),
    "echo": (
        "I heard: {thing}. Tell me more.",
        "You said: {thing}. Is that right?",
        "{Thing}. What makes you think of that?",
        "I understood: {thing}. Go on, please.",
    ),
}
