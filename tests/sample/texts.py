"""Three made-up documents of a few sentences each, and questions about them."""

DOCUMENTS = (
    "The Lindholm lighthouse stands on the western cape of the island of Varn. It was finished in 1874, "
    "after nine years of building, and its lamp can be seen from thirty kilometres away. The keeper's "
    "house beside it has been a museum since 1986 and is open from May to September.",
    "Marta Oyelaran was born in Bergen and studied marine biology in Lisbon. Since 2009 she has led the "
    "seabird survey of Varn, which counts puffins and kittiwakes every June. Her book about the survey "
    "won a prize.",
    "A ferry leaves for Varn from the harbour of Sollen every morning at seven and returns at six. The "
    "crossing takes fifty minutes. In winter it runs on Mondays and Fridays only, and dogs travel free of "
    "charge.",
)
QUESTIONS = (
    "When was the Lindholm lighthouse finished?",
    "What did Marta Oyelaran study?",
    "How long does the crossing to Varn take?",
)
SYSTEM = "Answer the question from the documents.\n\n"
